"""Transformer Engine's mask types, windows and padding masks, in which True is masked out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fp8.attention.modules.arguments import is_known, tell
from lightning_fp8.attention.ops import Band

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
Window = tuple[int, int]
"""The numbers of keys before and after the diagonal that a query attends to; -1 is all of them."""


def mask_type(name: str, argument: str = "attn_mask_type") -> str:
    """One of :data:`MASK_TYPES`; ``"causal,padding"``, ``"padding,causal"`` and ``"causal_padding"`` are the same.

    Args:
        name: the name in Transformer Engine.
        argument: the name of the argument, for the message.

    Raises:
        ValueError: If the name is unknown.
    """
    known = name.replace(",", "_") if isinstance(name, str) else ""
    known = "padding_causal" if known == "causal_padding" else known
    if known not in MASK_TYPES:
        raise ValueError(f"{argument}={name!r} is unknown; use one of {', '.join(map(repr, MASK_TYPES))}")
    return known


def checked_window(window_size: Sequence[int] | None) -> Window | None:
    """``(left, right)``.

    Raises:
        ValueError: If it is not a pair of integers of at least -1.
    """
    if window_size is None:
        return None
    sizes = tuple(window_size) if isinstance(window_size, (tuple, list)) else (window_size,)
    if len(sizes) != 2 or any(isinstance(size, bool) or not isinstance(size, int) or size < -1 for size in sizes):
        raise ValueError(
            f"window_size={window_size!r} must be two integers, how many keys before and after the diagonal a query "
            "sees; -1 is all of them"
        )
    return sizes[0], sizes[1]


def band_of(attn_mask_type: str, window_size: Window | None, bottom_right_diagonal: bool | None) -> Band:
    """The keys that each query attends to, as in Transformer Engine.

    A causal type masks all keys after the diagonal, whatever the window's right side is. The diagonal of ``causal``
    begins in the top left corner, that of ``causal_bottom_right`` ends in the bottom right one. For other types
    ``bottom_right_diagonal`` selects one of these; None is the bottom right. Source: ``DotProductAttention`` of
    Transformer Engine, ``check_set_window_size``.
    """
    left, right = (None if size < 0 else size for size in fitted_window(attn_mask_type, window_size) or (-1, -1))
    if "causal" not in attn_mask_type:
        return Band(left, right, bottom_right_diagonal is not False)
    return Band(left, 0, attn_mask_type.endswith("bottom_right"))


def fitted_window(attn_mask_type: str, window_size: Window | None) -> Window | None:
    """The window that Transformer Engine uses with this mask type, with a warning if it is not the one passed.

    Source: ``check_set_window_size`` of Transformer Engine.
    """
    if window_size is None:
        return None
    left, right = window_size
    if "causal" in attn_mask_type and right > 0:
        tell(
            f"window_size={window_size} with attn_mask_type={attn_mask_type!r} is taken for ({left}, 0): a causal mask "
            "sees nothing after the diagonal"
        )
        return left, 0
    if "causal" not in attn_mask_type and (left, right) == (-1, 0):
        tell(
            f"window_size=(-1, 0) with attn_mask_type={attn_mask_type!r} is taken for (-1, -1), as Transformer "
            "Engine does; pass attn_mask_type='causal' for a causal mask"
        )
        return -1, -1
    return window_size


def warn_of_no_effect(attn_mask_type: str, **given: bool) -> None:
    """Warn of arguments that are passed with a mask type that does not use them."""
    names = " and ".join(name for name, is_given in given.items() if is_given)
    if names:
        padding = "padding" if attn_mask_type in ("no_mask", "arbitrary") else f"padding_{attn_mask_type}"
        tell(
            f"{names} without effect: attn_mask_type={attn_mask_type!r} hides no padding; pass "
            f"attn_mask_type={padding!r}, or 'arbitrary' for a mask of another form"
        )


def cu_seqlens_of(attention_mask: Tensor, sequences: int, rows: int) -> Tensor:
    """The cumulative lengths of the unmasked parts of the sequences: int32 ``[B + 1]``.

    Args:
        attention_mask: bool ``[B, 1, 1, L]`` (or ``[B, L]``); True is masked out.
        sequences: B.
        rows: L.

    Raises:
        ValueError: If the shape or dtype is wrong, or if a row is masked out before one that is not (on a GPU, an
            assertion).
    """
    if not _is_padding_mask(attention_mask, sequences, rows):
        raise ValueError(
            f"a padding mask of {sequences} sequences of {rows} rows must be bool [{sequences}, 1, 1, {rows}] or "
            f"[{sequences}, {rows}], True where masked out; this is {attention_mask.dtype} {list(attention_mask.shape)}"
        )
    counts = ~attention_mask.reshape(sequences, rows)
    lengths = counts.sum(1, dtype=torch.int32)
    from_the_left = counts == (torch.arange(rows, device=counts.device) < lengths[:, None])
    wrong = (
        "a padding mask must mask out the end of each sequence; for other masks pass attn_mask_type='arbitrary', which "
        "runs in high precision"
    )
    if counts.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(from_the_left.all(), wrong)  # type: ignore[call-overload]  # asking would wait for the card
    elif not from_the_left.all():
        raise ValueError(wrong)
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _is_padding_mask(attention_mask: Tensor, sequences: int, rows: int) -> bool:
    shapes = (sequences, 1, 1, rows), (sequences, rows)
    return attention_mask.dtype == torch.bool and attention_mask.shape in shapes


def check_mask_beside(of: str, attention_mask: Tensor, cu_seqlens: Tensor, rows: int | None) -> None:
    """Check that a padding mask has the lengths of ``cu_seqlens``, which are used.

    Values are checked only on the host: reading them from a GPU would wait for it.

    Args:
        of: ``"q"`` or ``"kv"``.
        attention_mask: bool ``[B, 1, 1, L]`` (or ``[B, L]``); True is masked out. A tensor of another shape has no
            effect, and a warning is issued.
        cu_seqlens: integers ``[B + 1]``.
        rows: L; None is any.

    Raises:
        ValueError: If the mask has other lengths.
    """
    sequences, held = len(cu_seqlens) - 1, attention_mask.shape[-1] if rows is None and attention_mask.dim() else rows
    if held is None or not _is_padding_mask(attention_mask, sequences, held):
        tell(
            "attention_mask has no effect: cu_seqlens are used, and it is not a padding mask of these sequences but "
            f"{attention_mask.dtype} {list(attention_mask.shape)}; leave one of the two out"
        )
        return
    if not (is_known(attention_mask) and is_known(cu_seqlens)):
        return
    hides, lengths = attention_mask.reshape(sequences, held), cu_seqlens.diff()
    wrong = (hides != (torch.arange(held, device=lengths.device) >= lengths[:, None])).any(1) | (lengths > held)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        shown = int((~hides[first]).sum())
        raise ValueError(
            f"attention_mask shows {shown} rows of sequence {first}, and cu_seqlens_{of} say that its first "
            f"{int(lengths[first])} count; pass one of the two"
        )
