"""FP8 attention, from the ops up to unchanged models.

| | |
|---|---|
| ``ops/`` | casts and products: the ops, the specification in plain torch, launches |
| ``function.py`` | gradients; ``sequence_tables.py``: offsets of packed sequences |
| ``modules/`` | ``DotProductAttention`` |
| ``models/`` | calls of models that know nothing of FP8 |
| ``plan.py`` ``ran.py`` | what conversion plans, and what ran |

The kernels are in ``cuda_kernels/attention``.
"""
