"""FP8 attention, from the ops up to unchanged models.

| | |
|---|---|
| ``ops/`` | casts and products: the ops, the specification in plain torch, launches |
| ``function.py`` | gradients; ``sequence_tables.py``: offsets of packed sequences |
| ``modules/`` | ``DotProductAttention`` |
| ``models/`` | attention calls of unchanged models |
| ``plan.py`` | which attention conversion plans to run in FP8, and which ran |

The kernels are in ``cuda_kernels/attention``.
"""
