"""The command ``lightning-fp8``: LightningCLI, and one module for each other command."""
