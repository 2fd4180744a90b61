"""Decides which layers of a model run in FP8 and why, converts them in place, and compares with what really ran."""
