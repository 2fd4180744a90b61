"""Casts of attention's operands: means over sequences, E4M3 codes by head and 128 rows, row and transposed copies."""
