"""What is done to a thread's fragments of matrices, as words of kernel code.

:mod:`cuda_kernels.registers` and :mod:`cuda_kernels.warp_products` say what they do: these stand for them where no
compiler is imported.
"""

from __future__ import annotations

from cuda_kernels.language import UniTuple, f32, lowered


def registers(count: int) -> UniTuple:
    """The type of a fragment of ``count`` float32."""
    return UniTuple(f32, count)


zeros = lowered("registers", "zeros")
slice_of = lowered("registers", "slice_of")
scale_all = lowered("registers", "scale_all")
scale_rows = lowered("registers", "scale_rows")
scale_columns = lowered("registers", "scale_columns")
add = lowered("registers", "add")
add_rows = lowered("registers", "add_rows")
add_rows_of_two = lowered("registers", "add_rows_of_two")
column_pairs = lowered("registers", "column_pairs")
add_rows_and_columns = lowered("registers", "add_rows_and_columns")
add_columns = lowered("registers", "add_columns")
stage = lowered("registers", "stage")
largest_of_rows = lowered("registers", "largest_of_rows")
store_all = lowered("registers", "store_all")
load_matrices = lowered("warp_products", "load_matrices")
mma = lowered("warp_products", "mma")
