"""Norms that cast for the layers that read them."""
