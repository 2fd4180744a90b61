"""What kernels must compute before they are trusted: cases for each plan, and the process that runs them on a card.

| | |
|---|---|
| the kinds of plans, one example of each | ``kinds.py`` |
| the cases of a plan: small, ragged, and filling the card | ``cases.py`` |
| one call of an op by its kernels, compared with its specification | ``casts.py``, ``products.py``, ``attention.py`` |
| tensors to call it with; comparisons | ``drawing.py``, ``comparing.py`` |
| the process that a training process asks (``lightning_fp8/ops/proving.py``) | ``__main__.py`` |
| a look at the numbers of a model's first two training steps | ``first_steps.py`` |

The same cases run in the tests, on emulated kernels, and in ``python -m benchmarks.first_run``.
"""
