"""Measures which layers to keep in BF16, on a user's own model and batches."""

from lightning_fp8.sensitivity.measure import measure_sensitivity
from lightning_fp8.sensitivity.result import Check, Row, Sensitivity

__all__ = ["Check", "Row", "Sensitivity", "measure_sensitivity"]
