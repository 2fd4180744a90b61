"""Decides which layers of a model run in FP8, converts them in place, and checks after the first step what ran."""
