"""FP8 as a precision plugin of Lightning: Fabric's, the Trainer's, and what both say of wrong arguments."""
