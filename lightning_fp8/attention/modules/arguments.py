"""Checks of the arguments of DotProductAttention: sizes, lengths and tensors."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.modules.linear_layer import autocast_dtype
from lightning_fp8.notices import say_once

BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


class Sizes(NamedTuple):
    """The sizes of an attention layer.

    Attributes:
        heads: the number of query heads.
        groups: the number of key and value heads.
        channels: the number of channels of a query or key head.
        value_channels: the number of channels of a value head.
    """

    heads: int
    groups: int
    channels: int
    value_channels: int


def sizes_of(num_attention_heads: Any, kv_channels: Any, num_gqa_groups: Any) -> Sizes:
    """Raises:
    ValueError: If a number is not positive, or not divisible as required.
    """
    channels = tuple(kv_channels) if isinstance(kv_channels, (tuple, list)) else (kv_channels, kv_channels)
    if len(channels) != 2:
        raise ValueError(f"kv_channels={kv_channels!r} must be one number, or a pair: keys' channels and values'")
    groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
    named = {"num_attention_heads": num_attention_heads, "num_gqa_groups": groups}
    for name, value in [*named.items(), *(("kv_channels", size) for size in channels)]:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer")
    if num_attention_heads % groups:
        raise ValueError(f"num_gqa_groups={groups} does not divide num_attention_heads={num_attention_heads}")
    return Sizes(num_attention_heads, groups, *channels)


def checked_scale(softmax_scale: Any, channels: int) -> float:
    """The scale, or ``1 / sqrt(channels)`` if it is None.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is not finite, or not above 0, for which torch's attention returns NaN.
    """
    if softmax_scale is None:
        return float(channels**-0.5)
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise TypeError(f"softmax_scale={softmax_scale!r} must be a number, or None for 1 / sqrt(channels of a head)")
    if not 0 < softmax_scale < math.inf:
        raise ValueError(
            f"softmax_scale={softmax_scale!r} must be finite and above 0; pass None for 1 / sqrt(channels of a head), "
            "or negate the queries for a negative scale"
        )
    return float(softmax_scale)


def check_lengths(**lengths: Any) -> None:
    """Raises:
    TypeError: If one is neither None nor an integer.
    ValueError: If one is less than 0.
    """
    for name, length in lengths.items():
        if isinstance(length, bool) or not (length is None or isinstance(length, int)):
            raise TypeError(f"{name}={length!r} must be an integer, the rows of the longest sequence, or None")
        if length is not None and length < 0:
            raise ValueError(f"{name}={length} must be at least 0, the rows of the longest sequence")


said: dict[Any, str] = {}
"""The warnings about attention of the last model; they are issued again for another one."""


@torch.compiler.assume_constant_result
def tell(text: str) -> None:
    """Warn once for each ``text``; also while torch.compile traces."""
    say_once(said, text, stacklevel=4)


def unpacked(q: Any, k: Any, v: Any, qkv: Any, kv: Any, dim: int) -> tuple[Any, Any, Any]:
    """Queries, keys and values as views, if they are passed as one tensor that packs them along ``dim``.

    Raises:
        TypeError: If a packed tensor is passed together with one that it contains, or if a tensor is missing.
        ValueError: If ``dim`` is not supported, or if the number of tensors along it is wrong.
    """
    if qkv is None and kv is None:
        if q is None or k is None or v is None:
            raise TypeError("pass query_layer, key_layer and value_layer, or qkv_layer, or query_layer and kv_layer")
        return q, k, v
    if k is not None or v is not None or (qkv is None) == (q is None) or (qkv is not None and kv is not None):
        raise TypeError("pass qkv_layer without other tensors, and kv_layer only with query_layer")
    if dim not in (-3, -2):
        raise ValueError(f"qkv_interleave_dim={dim!r} must be -3, as [..., 3, h, d], or -2, as [..., h, 3, d]")
    name, packed, parts = ("qkv_layer", qkv, 3) if kv is None else ("kv_layer", kv, 2)
    if not isinstance(packed, Tensor) or packed.dim() < 3 or packed.shape[dim] != parts:
        shape = list(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
        raise ValueError(f"{name} must have {parts} tensors in dimension {dim}, qkv_interleave_dim; it is {shape}")
    *first, k, v = packed.unbind(dim)
    return (first[0] if first else q), k, v


def check_tensors(attention_mask: Any, **given: Any) -> None:
    """Raises:
    TypeError: If ``attention_mask`` is not a tensor, a pair of tensors or None, or if one of ``given`` is not a tensor
        or None.
    """
    for name, value in given.items():
        if not (value is None or isinstance(value, Tensor)):
            raise TypeError(f"{name} is {type(value).__name__}; it must be a tensor, or None")
    pair = attention_mask if isinstance(attention_mask, (tuple, list)) else (attention_mask, attention_mask)
    if attention_mask is not None and not (len(pair) == 2 and all(isinstance(each, Tensor) for each in pair)):
        of = f" of {', '.join(type(each).__name__ for each in pair)}" if pair is attention_mask else ""
        raise TypeError(
            f"attention_mask is {type(attention_mask).__name__}{of}; it must be a bool tensor, a pair of them for "
            "queries and keys, or None"
        )


def check_inputs(sizes: Sizes, qkv_format: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises:
    TypeError: If a tensor is not dense, or not of a floating-point dtype; if dtypes differ, and torch.autocast does not
        convert them to one.
    ValueError: If dimensions, heads or channels are not the layer's.
    """
    letters = {"sbhd": "[s, b, h, d]", "bshd": "[b, s, h, d]", "thd": "[t, h, d]"}[qkv_format]
    own = (
        ("query_layer", q, sizes.heads, sizes.channels),
        ("key_layer", k, sizes.groups, sizes.channels),
        ("value_layer", v, sizes.groups, sizes.value_channels),
    )
    for name, x, heads, channels in own:
        if not isinstance(x, Tensor):
            raise TypeError(f"DotProductAttention takes tensors; {name} is {type(x).__name__}")
        if not x.is_floating_point() or x.layout is not torch.strided or x.is_nested:
            raise TypeError(
                f"DotProductAttention takes dense floating-point tensors; {name} is {x.dtype}, {x.layout}"
                + (", nested: pass its values with qkv_format='thd' and cu_seqlens" if x.is_nested else "")
            )
        if x.dim() != len(qkv_format) or x.shape[-2:] != (heads, channels):
            raise ValueError(
                f"qkv_format={qkv_format!r} is {letters}, here with {heads} heads of {channels} channels; {name} has "
                f"shape {list(x.shape)}"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"{list(k.shape)} keys and {list(v.shape)} values differ; there is one value for each key")
    batch = {"bshd": 0, "sbhd": 1}.get(qkv_format)
    if batch is not None and q.shape[batch] != k.shape[batch]:
        raise ValueError(f"{q.shape[batch]} sequences of queries and {k.shape[batch]} of keys; both must be as many")
    if not q.dtype == k.dtype == v.dtype and autocast_dtype(q.device.type) is None:
        raise TypeError(
            f"query_layer, key_layer and value_layer are {q.dtype}, {k.dtype} and {v.dtype}; give all in one dtype, or "
            "run in torch.autocast"
        )


def check_longest(of: str, max_seqlen: int | None, cu_seqlens: Tensor | None) -> None:
    """Check, if the values are on the host, that no sequence has more rows; ``of`` is ``"q"`` or ``"kv"``.

    Raises:
        ValueError: If one has.
    """
    if max_seqlen is None or cu_seqlens is None or len(cu_seqlens) < 2 or not is_known(cu_seqlens):
        return
    longest = int(cu_seqlens.diff().max())
    if longest > max_seqlen:
        raise ValueError(
            f"max_seqlen_{of}={max_seqlen}, and cu_seqlens_{of} has a sequence of {longest} rows; "
            f"pass {longest}, or None"
        )


def is_known(x: Tensor) -> bool:
    """Whether the host can read the values of ``x`` without waiting for a GPU."""
    return not torch.compiler.is_compiling() and type(x) is Tensor and x.device.type == "cpu"


def check_cu_seqlens(name: str, cu_seqlens: Tensor | None, qkv_format: str, sequences: int | None, rows: int) -> None:
    """Check the starts of sequences in a tensor of ``rows``: L of a padded format, T of ``thd``.

    Values are checked only on the host: reading them from a GPU would wait for it.

    Raises:
        ValueError: If it is missing, not integers ``[B + 1]``, or of another batch, if it does not rise from 0, or if
            it exceeds the number of rows.
    """
    if cu_seqlens is None:
        if qkv_format == "thd":
            raise ValueError(f"qkv_format='thd' needs {name}, where each sequence starts; pass integers [B + 1]")
        return
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise ValueError(
            f"{name} is {cu_seqlens.dtype} {list(cu_seqlens.shape)}; it must be int32 or int64 [B + 1]: 0 first, then "
            "where each sequence ends"
        )
    if sequences is not None and len(cu_seqlens) != sequences + 1:
        raise ValueError(f"{name} has {len(cu_seqlens)} values for {sequences} sequences; it must have one more")
    if not is_known(cu_seqlens):
        return
    starts = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in itertools.pairwise(starts)]
    if starts[0] != 0 or min(lengths, default=0) < 0:
        raise ValueError(f"{name}={starts} does not rise from 0; it is the sequences' lengths added up, 0 first")
    longest = starts[-1] if qkv_format == "thd" else max(lengths, default=0)
    if longest > rows:
        what = "ends at row" if qkv_format == "thd" else "has a sequence of length"
        raise ValueError(f"{name}={starts} {what} {longest}; the tensor has {rows} rows in {qkv_format!r}")
