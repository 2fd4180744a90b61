"""Attention's backward pass: D, dQ with queries as rows, dK and dV with keys as rows."""
