"""Rotary position embedding: the angles of a model, and their application to queries and keys.

Source: Su et al., RoFormer, arXiv:2104.09864; arguments and shapes are Transformer Engine's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.arguments import require_bool, require_number, require_positive
from lightning_fp8.attention.modules.arguments import is_known
from lightning_fp8.attention.modules.packed import sequence_of
from lightning_fp8.numerics.scaling import FLOAT32_MAX
from lightning_fp8.te.keys import INV_FREQ


class RotaryPositionEmbedding(nn.Module):
    """Angles ``position * rotary_base ** (-2 i / dim)`` of each pair of channels, for ``rotary_pos_emb``.

    The frequencies are not a buffer: they are not in the ``state_dict``, and they stay float32 when a model is cast. In
    a lower precision the angles of distant positions would be off by whole rotations.

    Args:
        dim: the number of channels of a head.
        rotary_percent: the fraction of the channels that is rotated, from the first on.
        seq_len_interpolation_factor: together with ``pretrained_max_position_embeddings``, positions are divided by
            ``max(factor, max_seq_len / pretrained_max_position_embeddings)`` (arXiv:2306.15595). It has no effect
            alone.
        pretrained_max_position_embeddings: the number of positions that the model was trained with.
        rotary_base: the base of the geometric sequence of frequencies.
        interleaved: pair channels ``2 i`` and ``2 i + 1`` instead of ``i`` and ``i + dim / 2``.

    Raises:
        ValueError, TypeError: If an argument is not positive, or the number of rotated channels is odd or zero.
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        require_bool("interleaved", interleaved)
        require_positive("dim", dim)
        require_number("rotary_percent", rotary_percent, largest=1.0)
        require_number("rotary_base", rotary_base, largest=FLOAT32_MAX)
        if not rotary_base:
            raise ValueError("rotary_base=0 has no powers; it must be above 0")
        scaling = {
            "seq_len_interpolation_factor": seq_len_interpolation_factor,
            "pretrained_max_position_embeddings": pretrained_max_position_embeddings,
        }
        for name, value in scaling.items():
            if value is not None:
                require_positive(name, value)
        if list(scaling.values()).count(None) == 1:
            warnings.warn(f"{' and '.join(scaling)} have an effect only together; one of them is None", stacklevel=2)
        turning = int(dim * rotary_percent)
        if turning < 2 or turning % 2:
            raise ValueError(
                f"rotary_percent={rotary_percent} of dim={dim} is {turning} channels; it must be even and positive"
            )
        exponent = torch.arange(0, turning, 2, dtype=torch.float32, device="cpu") / turning
        self.inv_freq = rotary_base**-exponent
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.interleaved = interleaved

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """The angles of ``max_seq_len`` positions from ``offset`` on: float32 ``[max_seq_len, 1, 1, dim]``."""
        position = torch.arange(max_seq_len, dtype=torch.float32, device=self.inv_freq.device) + offset
        trained, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        if trained is not None and factor is not None:
            position = position / max(factor, max_seq_len / trained)
        angle = torch.outer(position, self.inv_freq)
        both = angle.repeat_interleave(2, 1) if self.interleaved else torch.cat([angle, angle], 1)
        return both[:, None, None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        device = fn(self.inv_freq.new_empty(0)).device
        if device.type != "meta":
            self.inv_freq = self.inv_freq.to(device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Drop the frequencies that Transformer Engine saves."""
        state_dict.pop(f"{prefix}{INV_FREQ}", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Rotate pairs of channels of ``t``. It computes in float32 or higher, and returns the dtype of ``t``.

    Args:
        t: ``[s, b, h, d]``, ``[b, s, h, d]`` or ``[t, h, d]``, according to ``tensor_format``.
        freqs: angles ``[s2, 1, 1, d2]`` of the positions from 0 on. Channels from ``d2`` on are not rotated.
        start_positions: integers ``[b]``, the position of each sequence's first row; None is 0.
        interleaved: pair channels ``2 i`` and ``2 i + 1`` instead of ``i`` and ``i + d2 / 2``.
        cu_seqlens: integers ``[b + 1]``, the starts of the sequences of ``"thd"``. Rows after the last sequence are
            padding, whose result is unspecified.
        lengths: integers ``[b]``, the number of rows of each sequence of ``"thd"`` if padding follows it. None means
            that each sequence ends where the next one starts.

    Raises:
        TypeError: If ``freqs`` is not a tensor.
        ValueError: If there are fewer positions than rows, more channels than in a head, or ``"thd"`` without
            ``cu_seqlens``.
    """
    if not isinstance(freqs, Tensor):
        raise TypeError(
            f"rotary_pos_emb={freqs!r} must be a tensor of angles [positions, 1, 1, channels], such as the result of "
            "RotaryPositionEmbedding(channels)(positions), a pair of such tensors, or None"
        )
    turning = freqs.shape[-1] if freqs.dim() else 0
    if freqs.dim() != 4 or freqs.shape[1:3] != (1, 1) or turning > t.shape[-1] or turning % 2:
        raise ValueError(
            f"rotary_pos_emb has shape {list(freqs.shape)}; it must be [positions, 1, 1, channels] with an even number "
            f"of at most {t.shape[-1]} channels, as RotaryPositionEmbedding returns it"
        )
    angle = _angles_of_rows(t, freqs.to(t.device), tensor_format, start_positions, cu_seqlens, lengths)
    wide = torch.promote_types(torch.promote_types(t.dtype, freqs.dtype), torch.float32)
    angle = angle.to(wide)
    x = t[..., :turning].to(wide)
    y = (x * angle.cos() + _quarter_turn(x, interleaved) * angle.sin()).to(t.dtype)
    return y if turning == t.shape[-1] else torch.cat([y, t[..., turning:]], -1)


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """Each pair of channels ``(a, b)`` as ``(-b, a)``."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _angles_of_rows(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str,
    start_positions: Tensor | None,
    cu_seqlens: Tensor | None,
    lengths: Tensor | None,
) -> Tensor:
    """The angles of each row of t, broadcastable to t."""
    if tensor_format == "thd":
        if cu_seqlens is None:
            raise ValueError("rotary_pos_emb with sequences of 'thd' needs cu_seqlens_q and cu_seqlens_kv")
        row = torch.arange(t.shape[0], device=t.device)
        starts = cu_seqlens.to(t.device)
        sequence = sequence_of(row, starts)
        position = row - starts[sequence]
        ends = starts.diff() if lengths is None else lengths.to(t.device)
        if start_positions is not None:
            position = position + start_positions.to(t.device)[sequence]
            ends = ends + start_positions.to(t.device)
        if len(ends) and is_known(ends):
            _check_positions(freqs, int(ends.max()))
        return freqs[position.clamp(0, len(freqs) - 1), 0]  # rows of padding
    length = t.shape[0] if tensor_format == "sbhd" else t.shape[1]
    if start_positions is None:
        _check_positions(freqs, length)
        angle = freqs[:length]  # [s, 1, 1, d]
    else:
        starts = start_positions.to(freqs.device)
        _check_positions(freqs, length + (int(starts.max()) if len(starts) else 0))
        angle = freqs[torch.arange(length, device=freqs.device)[:, None] + starts, 0]  # [s, b, 1, d]
    return angle if tensor_format == "sbhd" else angle.transpose(0, 1)


def _check_positions(freqs: Tensor, positions: int) -> None:
    if positions > len(freqs):
        raise ValueError(f"rotary_pos_emb has {len(freqs)} positions, fewer than the {positions} of the sequence")
