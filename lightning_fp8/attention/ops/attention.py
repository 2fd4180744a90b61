"""FP8 attention: the ops, and their specification in the formats of Transformer Engine.

The specification runs on the CPU, and on GPUs without a kernel; kernels are launched in ``cuda.py``.

Queries, keys, values and gradients have one of Transformer Engine's formats, with any strides: ``bshd [B, L, H, D]``,
``sbhd [L, B, H, D]``, or ``thd [T, H, D]`` with concatenated sequences. Outputs and gradients are contiguous in the
same format. ``cu_seqlens``, integers ``[B + 1]``, is where each sequence of ``thd`` starts; rows after the last
sequence are padding. In the other formats its differences are the sequences' lengths, and later rows are padding.

``softmax_scale`` is ``c`` of ``softmax(c q kᵀ)``; None is ``1 / sqrt(D)``.

Besides ``o``, the forward op returns :class:`Kept`, for the backward op only, as R packed rows of queries or keys. Each
sequence starts at a multiple of 128 packed rows, so that no block of scales is shared by two sequences: ``R = B
ceil(L / 128) 128`` for a padded batch. In ``thd``, sequence ``b`` starts at block ``cu_seqlens[b] // 128 + b`` of
``T // 128 + B`` blocks. This suffices for any lengths, so the host does not need to know them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cuda_kernels.attention.host.tiles import RowSpace, joined_numel
from lightning_fp8.attention.ops.casts import cast, rows_of_mean
from lightning_fp8.attention.ops.layouts import FORMATS, Packing, from_heads, row_space, to_heads
from lightning_fp8.attention.ops.masks import Band, Lengths
from lightning_fp8.attention.ops.reference import backward, forward
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.ops.op import op, spec

Shape = Sequence[int]
Gradients = tuple[Tensor, Tensor, Tensor]

_OPTIONS = "str qkv_format, int? left, int? right, bool bottom_right, bool centered, int? longest_query"


@spec(_OPTIONS)
class Attention(NamedTuple):
    """The options of attention.

    They are constants in compiled code. The softmax scale is not an option, since torch.compile may make it dynamic.

    Attributes:
        qkv_format: one of :data:`~lightning_fp8.attention.ops.layouts.FORMATS`.
        band: the mask: which keys a query attends to.
        centered: subtract a mean from keys before the cast; see
            :func:`lightning_fp8.attention.ops.casts.rows_of_mean`.
        longest_query: upper bound of the query sequences' lengths; None is the tensor's length.
    """

    qkv_format: str
    band: Band = Band()
    centered: bool = True
    longest_query: int | None = None

    @property
    def flat(self) -> tuple[str, int | None, int | None, bool, bool, int | None]:
        """The fields as the op's arguments."""
        return self.options()

    def options(self) -> tuple[str, int | None, int | None, bool, bool, int | None]:
        """:attr:`flat` as a method: Dynamo in torch 2.8 does not trace properties of a NamedTuple."""
        band = self.band
        return self.qkv_format, band.left, band.right, band.bottom_right, self.centered, self.longest_query

    @classmethod
    def from_flat(cls, *flat: Any) -> Attention:
        """The inverse of :attr:`flat`.

        Raises:
            ValueError: If a limit of the band is negative.
        """
        qkv_format, left, right, bottom_right, centered, longest_query = flat
        return cls(qkv_format, Band(left, right, bottom_right), centered, longest_query)


@spec(
    f"{_OPTIONS}, float? softmax_scale=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, Tensor? tables=None"
)
class AttentionCall(NamedTuple):
    """The last arguments of both ops.

    Attributes:
        attention: the options.
        softmax_scale: ``c``; None is ``1 / sqrt(D)``.
        cu_seqlens_q, cu_seqlens_kv: integers ``[B + 1]``, both or neither; required for ``thd``.
        tables: the result of :func:`attention_tables`; if None, each op computes it.
    """

    attention: Attention
    softmax_scale: float | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    tables: Tensor | None = None

    @property
    def flat(self) -> tuple[Any, ...]:
        return *self.attention.options(), self.softmax_scale, self.cu_seqlens_q, self.cu_seqlens_kv, self.tables

    @classmethod
    def from_flat(cls, *flat: Any) -> AttentionCall:
        options = _OPTIONS.count(",") + 1
        return cls(Attention.from_flat(*flat[:options]), *flat[options:])

    def softmax_scale_of(self, channels: int) -> float:
        """``c`` for heads of ``channels`` channels."""
        return channels**-0.5 if self.softmax_scale is None else self.softmax_scale


@spec("Tensor m, Tensor l, Tensor q8, Tensor q_scale_inv, Tensor k8, Tensor k_scale_inv, Tensor v8, Tensor v_scale_inv")
class Kept(NamedTuple):
    """The tensors that the backward pass needs in addition to the output, as packed rows; see the module's docstring.

    Attributes:
        m, l: float32 ``[H, R]``, the softmax statistics of each row of queries: its largest score times log2(e), and
            its sum of exponentials; see :func:`lightning_fp8.attention.ops.reference.forward`.
        q8, k8, v8: the codes of q, k and v, E4M3 ``[H, R, D]``; 0 in unused rows.
        q_scale_inv, k_scale_inv, v_scale_inv: float32 ``[H, R / 128]``, one for each block of 128 rows; 1 in unused
            blocks.
    """

    m: Tensor
    l: Tensor  # noqa: E741
    q8: Tensor
    q_scale_inv: Tensor
    k8: Tensor
    k_scale_inv: Tensor
    v8: Tensor
    v_scale_inv: Tensor

    @property
    def flat(self) -> tuple[Tensor, ...]:
        return tuple(self)

    @classmethod
    def from_flat(cls, *flat: Tensor) -> Kept:
        return cls(*flat)


def _check_call(call: AttentionCall) -> None:
    qkv_format = call.attention.qkv_format
    if qkv_format not in FORMATS:
        raise ValueError(f"qkv_format={qkv_format!r} is unknown; use one of {', '.join(FORMATS)}")
    if (call.cu_seqlens_q is None) != (call.cu_seqlens_kv is None):
        raise ValueError("cu_seqlens_q and cu_seqlens_kv come together; pass both or neither")


def _check_forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}; move them to one device")
    _check_call(call)


def _check_backward(do: Tensor, o: Tensor, kept: Kept, key_rows: int, call: AttentionCall) -> None:
    if o.shape != do.shape:
        raise ValueError(f"o has shape {tuple(o.shape)} and its gradient {tuple(do.shape)}; they must be the same")
    _check_call(call)


@op("attention_forward", check=_check_forward)
def attention_forward_op(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Kept]:
    """``softmax(c q kᵀ) v`` of high-precision tensors, which the op casts to FP8.

    Args:
        q, k, v: bfloat16, float16 or float32, in the format of ``call.attention``.

    Returns:
        ``o`` in q's dtype and format, and what :func:`attention_backward` needs.

    Raises:
        ValueError: If the format is unknown, or if heads, lengths, devices or ``cu_seqlens`` do not match.
    """
    qkv_format = call.attention.qkv_format
    queries, keys = row_space(q, qkv_format, call.cu_seqlens_q), row_space(k, qkv_format, call.cu_seqlens_kv)
    codes = []
    for x, space in ((q, queries), (k, keys), (v, keys)):
        heads, channels = x.shape[-2:]
        codes.append(x.new_empty((heads, space.total, channels), dtype=E4M3.dtype))
        codes.append(x.new_empty((heads, space.blocks), dtype=torch.float32))
    m, l = (q.new_empty((q.shape[-2], queries.total), dtype=torch.float32) for _ in range(2))  # noqa: E741
    return q.new_empty((*q.shape[:-1], v.shape[-1])), Kept(m, l, *codes)


@op("attention_backward", check=_check_backward)
def attention_backward_op(do: Tensor, o: Tensor, kept: Kept, key_rows: int, call: AttentionCall) -> Gradients:
    """The gradients of q, k and v in ``do``'s dtype.

    Args:
        do: the gradient of ``o``.
        o: the output of the forward op, or its BF16 copy: it is rounded to BF16.
        kept: the second result of the forward op.
        key_rows: L of keys and values; T in ``thd``.

    Raises:
        ValueError: If ``do`` and ``o`` have different shapes.
    """
    heads, _, channels = kept.k8.shape
    rows = {"thd": (key_rows,), "bshd": (do.shape[0], key_rows), "sbhd": (key_rows, do.shape[1])}
    shape = (*rows[call.attention.qkv_format], heads, channels)
    return do.new_empty(do.shape), do.new_empty(shape), do.new_empty(shape)


@op("attention_tables")
def attention_tables_op(
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    attention: Attention,
    query_rows: int,
    key_rows: int,
    device: torch.device,
) -> Tensor:
    """The tables of a batch's lengths that GPU kernels read in both passes, reusable by all calls with these arguments.

    Args:
        query_rows, key_rows: L of queries and of keys; T in ``thd``.
        device: the queries' device.

    Returns:
        int32, for :attr:`AttentionCall.tables`. It does not follow later changes of ``cu_seqlens``.
    """
    spaces = spaces_of(cu_seqlens_q, cu_seqlens_kv, attention, query_rows, key_rows)
    return cu_seqlens_q.new_empty(joined_numel(*spaces, rows_of_mean(attention.band)), dtype=torch.int32, device=device)


attention_forward: Callable[[Tensor, Tensor, Tensor, AttentionCall], tuple[Tensor, Kept]] = attention_forward_op.call
attention_backward: Callable[[Tensor, Tensor, Kept, int, AttentionCall], Gradients] = attention_backward_op.call
attention_tables: Callable[[Tensor, Tensor, Attention, int, int, torch.device], Tensor] = attention_tables_op.call


def spaces_of(
    cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, attention: Attention, query_rows: int, key_rows: int
) -> tuple[RowSpace, RowSpace]:
    """The packed rows of queries and of keys; ``query_rows``, ``key_rows``: L, or T in ``thd``."""
    ragged, pairs = attention.qkv_format == "thd", ((cu_seqlens_q, query_rows), (cu_seqlens_kv, key_rows))
    queries, keys = (RowSpace(cu_seqlens.shape[0] - 1, rows, ragged) for cu_seqlens, rows in pairs)
    return queries, keys


def reference_attention_forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Kept]:
    """Cast, compute :func:`~lightning_fp8.attention.ops.reference.forward`, and pack the codes."""
    qkv_format, band, centered, _ = call.attention
    q_heads, q_lengths = to_heads(q, qkv_format, call.cu_seqlens_q)
    k_heads, k_lengths = to_heads(k, qkv_format, call.cu_seqlens_kv)
    v_heads, _ = to_heads(v, qkv_format, call.cu_seqlens_kv)
    lengths = None if q_lengths is None or k_lengths is None else Lengths(q_lengths, k_lengths)
    q8, v8 = cast(q_heads, False, q_lengths), cast(v_heads, False, k_lengths)
    k8 = cast(k_heads, centered, k_lengths, rows_of_mean(band))
    o, m, l = forward(q8, k8, v8, call.softmax_scale_of(q.shape[-1]), band, lengths, q.dtype)  # noqa: E741
    of_queries = Packing(q, qkv_format, call.cu_seqlens_q)
    of_keys = Packing(k, qkv_format, call.cu_seqlens_kv)
    codes = of_queries.pack_codes(q8), of_keys.pack_codes(k8), of_keys.pack_codes(v8)
    kept = Kept(of_queries.pack(m, -torch.inf), of_queries.pack(l), *(tensor for pair in codes for tensor in pair))
    return from_heads(o, qkv_format, call.cu_seqlens_q, len(q)), kept


def reference_attention_backward(do: Tensor, o: Tensor, kept: Kept, key_rows: int, call: AttentionCall) -> Gradients:
    """The gradients, by :func:`~lightning_fp8.attention.ops.reference.backward`."""
    qkv_format, band, *_ = call.attention
    do_heads, q_lengths = to_heads(do, qkv_format, call.cu_seqlens_q)
    o_heads, _ = to_heads(o, qkv_format, call.cu_seqlens_q)
    lengths = None
    if q_lengths is not None and call.cu_seqlens_kv is not None:
        lengths = Lengths(q_lengths, call.cu_seqlens_kv.diff())
    of_queries = Packing(do, qkv_format, call.cu_seqlens_q)
    of_keys = Packing(do, qkv_format, call.cu_seqlens_kv, key_rows)
    q8 = of_queries.unpack_codes(kept.q8, kept.q_scale_inv)
    k8, v8 = of_keys.unpack_codes(kept.k8, kept.k_scale_inv), of_keys.unpack_codes(kept.v8, kept.v_scale_inv)
    m, l = of_queries.unpack(kept.m, -torch.inf), of_queries.unpack(kept.l)  # noqa: E741
    softmax_scale = call.softmax_scale_of(do.shape[-1])
    do8 = cast(do_heads, lengths=q_lengths)
    dq, dk, dv = backward(do8, q8, k8, v8, o_heads, m, l, softmax_scale, band, lengths, do.dtype)
    dq = from_heads(dq, qkv_format, call.cu_seqlens_q, len(do))
    dk, dv = (from_heads(gradient, qkv_format, call.cu_seqlens_kv, key_rows) for gradient in (dk, dv))
    return dq, dk, dv


attention_forward_op.implement("cpu", reference_attention_forward)
attention_backward_op.implement("cpu", reference_attention_backward)


@register_flop_formula(attention_forward_op.overload.overloadpacket)
def _forward_flops(q: Shape, k: Shape, v: Shape, *call: Any, **kwargs: Any) -> int:
    """FLOPs of two products per pair of a query and a key; masked pairs count too, as in torch's formula."""
    return 2 * _pairs(q, k, call) * (q[-1] + v[-1])


@register_flop_formula(attention_backward_op.overload.overloadpacket)
def _backward_flops(do: Shape, *others: Any, **kwargs: Any) -> int:
    """FLOPs of five products: the scores again, and the gradients of the scores, of q, of k and of v."""
    num_kept = len(Kept._fields)
    kept, key_rows, call = others[1 : 1 + num_kept], others[1 + num_kept], others[2 + num_kept :]
    of_queries, of_values = (kept[Kept._fields.index(name)] for name in ("q8", "v8"))
    return 2 * _pairs(do, [key_rows] * 2, call) * (3 * of_queries[-1] + 2 * of_values[-1])


def _pairs(queries: Shape, keys: Shape, call: Sequence[Any]) -> int:
    """Pairs of a query and a key in all heads; for ``thd``, sequences are assumed to have equal lengths."""
    qkv_format = next(value for value in call if isinstance(value, str))
    if qkv_format == "thd":
        (starts, *_) = (value for value in call if isinstance(value, torch.Size))
        return queries[-2] * queries[0] * keys[0] // (starts[0] - 1)
    return queries[-2] * queries[0] * queries[1] * keys[1 if qkv_format == "bshd" else 0]
