"""The specification of FP8 attention: ``o = softmax(c q kᵀ) v`` and its gradients, every product of E4M3 codes.

The recurrences are those of FlashAttention-2 (Dao, arXiv:2307.08691): the forward pass visits keys in tiles with a
running maximum; the backward pass recomputes the scores and uses ``dS = P (dP - D)``. FP8 adds the following.
Probabilities are cast relative to their tile's maximum. In the backward pass, each row of a product's left operand has
its own scale within a tile, so that neither an attention sink (one key with most of the mass) nor a gradient's range
underflows. The backward pass has two parts, one with queries as rows (dQ) and one with keys as rows (dK, dV), so that
this scale is always along the rows of the result, where it can be divided out.

Tiles are part of the specification, since they determine scales: 128 keys in the forward pass and for dQ, 64 queries
for dK and dV. Products of codes are exact, and accumulated in float32; scales are applied afterwards. Exponentials have
base 2: log2(e) is included in the factor of the scores. The order of all operations is fixed, so results are
deterministic.

For speed, all rows that attend to a tile are computed at once, for all sequences and heads. A kernel may differ only in
the order of float32 additions, in which rows become NaN beside a NaN in their tile, and at extreme magnitudes: scores
beyond 1e5, whose exponents it rounds at other places, dS beyond 2**126, and rows of P and dS that are below 1e-36
before they are multiplied by the scale of dO or Q.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from lightning_fp8.attention.ops.casts import START, Codes, round_rows, round_rows_running
from lightning_fp8.attention.ops.masks import Band, Lengths
from lightning_fp8.attention.ops.tiles import TiledCall
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.ops.bf16_products import bf16_products
from lightning_fp8.ops.cast import decode, saturating_cast

TOP = 8
"""log2 of the code of a tile's largest probability forward: 256 is the largest power of two in E4M3."""
REACH = 40
"""A tile's unit is at least 2**-40 of a row's largest value so far, so that rescaling does not overflow."""

ALL = Band()

P = ParamSpec("P")
R = TypeVar("R")


def _of_codes(function: Callable[Concatenate[Codes, P], R]) -> Callable[Concatenate[Codes, P], R]:
    """Decorator: no gradients, and products that are exact for codes, also under torch.autocast."""

    @wraps(function)
    def exact(first: Codes, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), torch.autocast(first.data.device.type, enabled=False), bf16_products():
            return function(first, *args, **kwargs)

    return exact


@_of_codes
def forward(
    q: Codes, k: Codes, v: Codes, softmax_scale: float,
    band: Band = ALL, lengths: Lengths | None = None, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention's output and the statistics that the backward pass needs.

    Args:
        q: ``[B, H, Lq, D]``.
        k, v: ``[B, H / G, Lk, D]``; query head ``h`` uses head ``h // G``.
        softmax_scale: ``c``.
        band: the mask.
        lengths: the lengths of the sequences in a padded batch.
        dtype: the dtype of the output.

    Returns:
        ``o [B, H, Lq, D]`` in ``dtype``; float32 ``m [B, H, Lq]``, a row's largest score times log2(e), and
        ``l [B, H, Lq]``, its sum of ``2**(score log2(e) - m)``. The natural logarithm of the row's sum of exponentials
        is ``m ln(2) + ln(l)``; scores are of the keys as cast, without their mean if centered. Padding, and rows that
        attend to no key, have ``o = 0``, ``m = -inf``, ``l = 0``.
    """
    call = TiledCall(q, k, softmax_scale, band, lengths)
    queries, keys, values = call.grouped(q.decode()), _flat(k.decode()), _flat(v.decode())
    score_of_row, score_of_key = call.grouped(q.by_row()) * call.c, _flat(k.scale_inv)
    value_scale_inv = _flat(v.scale_inv)

    one = queries.new_ones(())
    out = queries.new_zeros(*queries.shape[:3], values.shape[2])
    total = queries.new_zeros(queries.shape[:3])
    largest = torch.full_like(total, -torch.inf)
    units = largest.clone()  # log2 of the unit of ``out`` and ``total``: that of the last tile added
    for block, query_slice, key_slice in call.tiles_of_keys():
        scores = _product(queries[:, :, query_slice], keys[:, key_slice].mT)
        scores *= (score_of_row[:, :, query_slice] * score_of_key[:, block, None, None])[..., None]
        call.hide(scores, query_slice, key_slice)
        tile_largest = scores.amax(3)
        largest[:, :, query_slice] = torch.maximum(largest[:, :, query_slice], tile_largest)
        unit = torch.maximum(tile_largest, largest[:, :, query_slice] - REACH)
        zero = torch.where(unit == -torch.inf, 0.0, unit)  # for rows without a visible key yet: 2**-inf below, not NaN
        probability = scores.sub_((zero - TOP)[..., None]).exp2_()
        alpha = torch.exp2(units[:, :, query_slice] - zero)
        units[:, :, query_slice] = unit
        # Probabilities are summed before the cast below rounds them.
        total[:, :, query_slice] = total[:, :, query_slice] * alpha + probability.sum(3)
        codes = decode(saturating_cast(probability, one, E4M3)).float()
        part = _product(codes, values[:, key_slice]) * value_scale_inv[:, block, None, None, None]
        out[:, :, query_slice] = out[:, :, query_slice] * alpha[..., None] + part
    blind = total == 0
    out = torch.where(blind[..., None], 0.0, out / total[..., None])  # the common factor 2**TOP cancels
    total = torch.where(blind, 0.0, total * torch.exp2(units - largest - TOP))
    return call.apart(out).to(dtype), call.apart(largest), call.apart(total)


@_of_codes
def backward(
    do: Codes, q: Codes, k: Codes, v: Codes, o: Tensor, m: Tensor, l: Tensor, softmax_scale: float,  # noqa: E741
    band: Band = ALL, lengths: Lengths | None = None, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of :func:`forward`, from the same operands and its results.

    Args:
        do: the gradient of ``o``, cast like q, k and v.
        o: the output; rounded to BF16, in which it is saved.
        m, l: the statistics that :func:`forward` returns.

    Returns:
        ``dq [B, H, Lq, D]``, ``dk`` and ``dv [B, H / G, Lk, D]`` in ``dtype``. A row that attends to no key has
        ``dq = 0`` and does not contribute to the others, if its ``q`` and ``do`` are finite. A key without queries has
        ``dk = dv = 0``.
    """
    call = TiledCall(q, k, softmax_scale, band, lengths)
    # 2**(score - total) is a probability; 0 in rows without keys
    total = torch.where(l == 0, torch.inf, m + torch.log2(l))
    # D = rowsum(P dP), from the same codes that dP is computed from: otherwise the rounding of dO would not cancel.
    delta = (do.decode() * o.to(torch.bfloat16).float()).sum(3) * do.by_row()
    dq, rest = _dq(call, do, q, k, v, call.grouped(total), call.grouped(delta))
    dk, dv = _dk_dv(call, do, q, k, v, call.grouped(total), call.grouped(delta) + rest)
    return call.apart(dq).to(dtype), dk.view(k.data.shape).to(dtype), dv.view(v.data.shape).to(dtype)


def _dq(
    call: TiledCall, do: Codes, q: Codes, k: Codes, v: Codes, total: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """dQ, and each row's sum of dS: the correction to D with which the rows of the exact gradient sum to 0."""
    queries, keys = call.grouped(q.decode()), _flat(k.decode())
    gradients, values = call.grouped(do.decode()), _flat(v.decode())
    score_of_row, gradient_scale_inv = call.grouped(q.by_row()) * call.c, call.grouped(do.by_row())
    key_scale_inv, value_scale_inv = _flat(k.scale_inv), _flat(v.scale_inv)

    dq, rest = torch.zeros_like(queries), torch.zeros_like(total)
    for block, query_slice, key_slice in call.tiles_of_keys():
        scores = _product(queries[:, :, query_slice], keys[:, key_slice].mT)
        scores *= (score_of_row[:, :, query_slice] * key_scale_inv[:, block, None, None])[..., None]
        call.hide(scores, query_slice, key_slice)
        ds = _product(gradients[:, :, query_slice], values[:, key_slice].mT)
        ds *= (gradient_scale_inv[:, :, query_slice] * value_scale_inv[:, block, None, None])[..., None]
        ds -= delta[:, :, query_slice, None]
        ds *= scores.sub_(total[:, :, query_slice, None]).exp2_()
        rest[:, :, query_slice] += ds.sum(3)
        codes, inverse = round_rows(ds)
        unit = inverse * key_scale_inv[:, block, None, None, None]
        dq[:, :, query_slice] += _product(codes, keys[:, key_slice]) * unit
    return dq.mul_(call.softmax_scale), rest


def _dk_dv(
    call: TiledCall, do: Codes, q: Codes, k: Codes, v: Codes, total: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """dK and dV, looping over the heads that share keys, and over tiles of their queries."""
    queries, keys = call.grouped(q.decode()), _flat(k.decode())
    gradients, values = call.grouped(do.decode()), _flat(v.decode())
    query_scale_inv, gradient_scale_inv = call.grouped(q.scale_inv), call.grouped(do.scale_inv)
    score_of_key, value_scale_inv = _flat(k.by_row()) * call.c, _flat(v.by_row())

    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    fitted_p, fitted_ds = (keys.new_full((*keys.shape[:2], 1), START) for _ in range(2))
    for head in range(call.group):
        for block, query_slice, key_slice in call.tiles_of_queries():
            q_tile, do_tile = queries[:, head, query_slice], gradients[:, head, query_slice]
            q_scale_inv, do_scale_inv = (x[:, head, block, None, None] for x in (query_scale_inv, gradient_scale_inv))
            p = torch.bmm(keys[:, key_slice], q_tile.mT) * (score_of_key[:, key_slice, None] * q_scale_inv)
            call.hide(p[:, None].mT, query_slice, key_slice)
            p.sub_(total[:, head, None, query_slice]).exp2_()
            ds = torch.bmm(values[:, key_slice], do_tile.mT) * (value_scale_inv[:, key_slice, None] * do_scale_inv)
            ds -= delta[:, head, None, query_slice]
            ds *= p
            # The right operand's scale is applied to the left one, so that all tiles' products have the row's unit.
            codes, inverse = round_rows_running(p.mul_(do_scale_inv), fitted_p[:, key_slice])
            dv[:, key_slice] += torch.bmm(codes, do_tile) * inverse
            codes, inverse = round_rows_running(ds.mul_(q_scale_inv), fitted_ds[:, key_slice])
            dk[:, key_slice] += torch.bmm(codes, q_tile) * inverse
    return dk.mul_(call.softmax_scale), dv


def _flat(x: Tensor) -> Tensor:
    """``[B, H, ...]`` to ``[N, ...]``."""
    return x.flatten(0, 1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``[N, G, R, K]`` times ``[N, K, C]``: ``[N, G, R, C]`` in float32. Exact for codes, also in BF16 products."""
    return torch.bmm(left.flatten(1, 2), right).unflatten(1, left.shape[1:3])
