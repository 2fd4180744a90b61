"""Attention of unchanged models: how its calls are intercepted, and what decides whether they run in FP8.

transformers' models call attention by a name in their configuration (``hf.py``), all others through
``torch.nn.functional.scaled_dot_product_attention`` (``sdpa.py``). Both look up the calling module in ``owners.py``.
``plan.py`` plans which attention runs in FP8, and finds which ran.
"""
