"""Formats, scales, layouts and recipes: values and formulas."""
