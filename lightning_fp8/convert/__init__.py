"""Which layers of a model run in FP8 and why, their conversion in place, and what really ran."""
