"""Results and gradients that FP8 layers read as FP8 copies, and all else as values, which are computed then."""
