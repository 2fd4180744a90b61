"""The command ``lightning-fp8``: LightningCLI, and a module for each command of our own."""
