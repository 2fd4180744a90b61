"""Triton's kernels, what each is called with, and what it must give: float64's result, or the kernel's own definition.

Operands of products are small integers, so that every order of summation gives the exact product.
"""

from __future__ import annotations

from tests.foreign.attention_cases import ATTENTION
from tests.foreign.cast_cases import CASTS
from tests.foreign.product_cases import PRODUCTS
from tests.foreign.row_cases import ROWS

CASES = [*PRODUCTS, *ATTENTION, *CASTS, *ROWS]
