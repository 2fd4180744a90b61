"""FP8 as a precision plugin of Lightning, for Fabric and for the Trainer."""
