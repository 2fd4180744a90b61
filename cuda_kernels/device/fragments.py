"""Operations on matrix fragments, for kernel code; implemented by :mod:`cuda_kernels.lowering`."""

from __future__ import annotations

from cuda_kernels.device.language import UniTuple, f32, lowered


def fragment_type(num_registers: int) -> UniTuple:
    """The type of a fragment of ``num_registers`` float32."""
    return UniTuple(f32, num_registers)


zeros = lowered("fragments", "zeros")
slice_fragment = lowered("fragments", "slice_fragment")
scale_all = lowered("fragments", "scale_all")
scale_rows = lowered("fragments", "scale_rows")
scale_columns = lowered("fragments", "scale_columns")
add = lowered("fragments", "add")
add_rows = lowered("fragments", "add_rows")
add_rows_of_two = lowered("fragments", "add_rows_of_two")
column_pairs = lowered("fragments", "column_pairs")
add_rows_and_columns = lowered("fragments", "add_rows_and_columns")
add_columns = lowered("fragments", "add_columns")
store_fragment_shared = lowered("fragments", "store_fragment_shared")
store_fragment_global = lowered("fragments", "store_fragment_global")
ldmatrix_x4 = lowered("fragments", "ldmatrix_x4")
mma = lowered("fragments", "mma")

# For attention.
rows_max = lowered("attention_fragments", "rows_max")
rows_sum = lowered("attention_fragments", "rows_sum")
exp2_rows = lowered("attention_fragments", "exp2_rows")
rescale_add_rows = lowered("attention_fragments", "rescale_add_rows")
scale_seen_rows = lowered("attention_fragments", "scale_seen_rows")
mask_rows = lowered("attention_fragments", "mask_rows")
pack_a_words = lowered("attention_fragments", "pack_a_words")
slice_words = lowered("attention_fragments", "slice_words")

# For attention's backward pass.
exp2_columns = lowered("score_gradients", "exp2_columns")
score_gradients_rows = lowered("score_gradients", "score_gradients_rows")
score_gradients_columns = lowered("score_gradients", "score_gradients_columns")
rows_amax = lowered("score_gradients", "rows_amax")
add_rows_to_global = lowered("score_gradients", "add_rows_to_global")
add_from_global = lowered("score_gradients", "add_from_global")
