"""Proofs of kernels before they are used: test cases for each plan, and the process that runs them on a GPU.

| | |
|---|---|
| the kinds of plans, with one example each | ``kinds.py`` |
| the cases of a plan: small, ragged, and filling the GPU | ``cases.py`` |
| one call of an op by its kernels, compared with its specification | ``casts.py``, ``products.py``, ``attention.py`` |
| input tensors; comparisons | ``drawing.py``, ``comparing.py`` |
| the process that serves a training process (``lightning_fp8/ops/proving.py``) | ``__main__.py`` |
| checks of the first two training steps, on the model's own shapes | ``model_shapes.py`` |

The same cases run in the tests, on emulated kernels, and in ``python -m benchmarks.first_run``.
"""
