"""What is done to a thread's fragments of matrices, as words of kernel code.

They stand for functions of the modules ``fragments`` and ``warp_products`` in :mod:`cuda_kernels.lowering`.
"""

from __future__ import annotations

from cuda_kernels.device.language import UniTuple, f32, lowered


def fragment_type(count: int) -> UniTuple:
    """The type of a fragment of ``count`` float32."""
    return UniTuple(f32, count)


zeros = lowered("fragments", "zeros")
slice_of = lowered("fragments", "slice_of")
scale_all = lowered("fragments", "scale_all")
scale_rows = lowered("fragments", "scale_rows")
scale_columns = lowered("fragments", "scale_columns")
add = lowered("fragments", "add")
add_rows = lowered("fragments", "add_rows")
add_rows_of_two = lowered("fragments", "add_rows_of_two")
column_pairs = lowered("fragments", "column_pairs")
add_rows_and_columns = lowered("fragments", "add_rows_and_columns")
add_columns = lowered("fragments", "add_columns")
store_fragment = lowered("fragments", "store_fragment")
largest_of_rows = lowered("fragments", "largest_of_rows")
store_all = lowered("fragments", "store_all")
ldmatrix_x4 = lowered("warp_products", "ldmatrix_x4")
mma = lowered("warp_products", "mma")
