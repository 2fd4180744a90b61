"""Attention of models that know nothing of FP8: how its calls are reached, and what decides where they run.

transformers' models call it by a name in their configuration (:mod:`~lightning_fp8.attention.models.hf`), all others
through ``torch.nn.functional.scaled_dot_product_attention`` (:mod:`~lightning_fp8.attention.models.sdpa`). Both ask
:mod:`lightning_fp8.attention.models.owners`, where each module that computes attention has an entry.
"""
