"""FP8 attention, from the ops up to a module; attention of unchanged models is in ``convert/attention_calls``.

| | |
|---|---|
| ``ops/`` | casts and products: the ops, the specification in plain torch, launches |
| ``function.py`` | gradients; ``sequence_tables.py``: offsets of packed sequences |
| ``modules/`` | ``DotProductAttention`` |

The kernels are in ``cuda_kernels/attention``.
"""
