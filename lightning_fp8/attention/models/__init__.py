"""Attention of unchanged models: how its calls are intercepted, and what decides whether they run in FP8.

transformers' models call attention by a name in their configuration (:mod:`~lightning_fp8.attention.models.hf`), all
others through ``torch.nn.functional.scaled_dot_product_attention`` (:mod:`~lightning_fp8.attention.models.sdpa`). Both
look up the calling module in :mod:`lightning_fp8.attention.models.owners`.
"""
