"""Timings: ``python -m benchmarks --json out.json``."""
