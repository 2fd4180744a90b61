"""``transformer_engine.pytorch.attention.rope``."""

from __future__ import annotations

from torch import Tensor

from lightning_fp8.arguments import one_of, require_bool
from lightning_fp8.transformer import RotaryPositionEmbedding, rotary

__all__ = ["RotaryPositionEmbedding", "apply_rotary_pos_emb"]


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Turn pairs of channels of ``t`` by angles, computed in float32 at least: contiguous, in t's dtype.

    Args:
        t: ``[s, b, h, d]``, ``[b, s, h, d]`` or ``[t, h, d]``, as ``tensor_format`` says.
        freqs: angles ``[s2, 1, 1, d2]``, as :class:`lightning_fp8.RotaryPositionEmbedding` computes them.
        tensor_format: ``"sbhd"``, ``"bshd"`` or ``"thd"``.
        start_positions: integers ``[b]``, the position of each sequence's first row; None is 0.
        interleaved: pairs are channels ``2 i`` and ``2 i + 1``, else ``i`` and ``i + d2 / 2``.
        fused: has no effect.
        cu_seqlens: integers ``[b + 1]``, where sequences of ``"thd"`` start.
        cp_size, cp_rank: taken at their defaults: ``freqs`` are those of this rank's positions.

    Raises:
        NotImplementedError: If ``cp_size`` or ``cp_rank`` is not at its default.
        TypeError, ValueError: If an argument is invalid.
    """
    one_of("tensor_format", tensor_format, ("sbhd", "bshd", "thd"))
    require_bool("fused", fused)
    for name, value, default in (("cp_size", cp_size, 1), ("cp_rank", cp_rank, 0)):
        if value != default:
            raise NotImplementedError(
                f"{name}={value!r} is not supported by apply_rotary_pos_emb: leave it out, and pass the freqs of this "
                "rank's positions, get_batch_on_this_cp_rank(freqs, cp_group, seq_dim=0)"
            )
    return rotary.apply_rotary_pos_emb(t, freqs, tensor_format, start_positions, interleaved, cu_seqlens).contiguous()
