"""Attention ops on CUDA tensors. Calls are planned once per key; without a kernel, the specification runs.

A *problem* is derived from shapes, dtypes and options; a *plan* runs its kernels.

Nothing here synchronizes with the device: the numbers of blocks follow from shapes, and ``cu_seqlens`` on the GPU are
not read by the host. ``cu_seqlens`` on the host are copied at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_kernels.attention.casts.heads import HeadsSpec
from cuda_kernels.attention.host.backward import BackwardLaunch, GradientLaunch, Operands
from cuda_kernels.attention.host.forward import (
    AttentionProblem,
    CastLaunch,
    ForwardLaunch,
    PackedCodes,
    Strides,
    TransposeLaunch,
)
from cuda_kernels.attention.host.tiles import (
    BatchTables,
    CastTables,
    PackedRows,
    RowSpace,
    Visible,
    cast_table,
    packed_rows,
)
from cuda_kernels.attention.mma import operands as mma
from cuda_kernels.attention.spec import HEAD_DIMS, ROWS, AttentionSpec
from cuda_kernels.device.sizes import DtypeName
from cuda_kernels.host.launch import NoKernels, architecture_of, name_of
from cuda_kernels.kernel import KernelError
from lightning_fp8.attention.ops.attention import (
    Attention,
    AttentionCall,
    Gradients,
    Kept,
    attention_backward_op,
    attention_forward_op,
    attention_tables_op,
    reference_attention_backward,
    reference_attention_forward,
    spaces_of,
)
from lightning_fp8.attention.ops.casts import rows_of_mean
from lightning_fp8.attention.ops.codes import (
    QueriesKept,
    attention_cast_op,
    attention_forward_of_codes_op,
    reference_attention_cast,
    reference_attention_forward_of_codes,
)
from lightning_fp8.attention.ops.masks import Band
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.ops.checks import DTYPE_NAMES
from lightning_fp8.ops.memory import PlainKey, tensor_key
from lightning_fp8.ops.plans import EmptyTensor, Fallback, cached, check_not_empty, current_device, planned

CallKey = tuple[tuple[Any, ...], float | None, int | None]
"""The options, flattened; the softmax scale; and the number of sequences if a call passes their lengths."""


class Heads(NamedTuple):
    """Metadata of an attention tensor in one of Transformer Engine's QKV formats, with contiguous channels.

    Attributes:
        dtype: the name of the tensor's dtype.
        heads, head_dim: the number of heads, and the number of channels of each head.
        space: the layout of the packed rows.
        strides: the strides of the sequence, the row and the head dimension, in elements.
        aligned: whether the tensor's address is a multiple of the size of four elements.
    """

    dtype: DtypeName
    heads: int
    head_dim: int
    space: RowSpace
    strides: Strides
    aligned: bool

    @classmethod
    def of(cls, key: PlainKey, qkv_format: str, sequences: int) -> Heads:
        """The metadata of a tensor with this key; ``sequences``: their number, used for ``thd``."""
        dtype, shape, strides, alignment = key
        # The stride of a dimension of size 1 is arbitrary, and is not used by any address.
        *outer, of_head = (0 if size == 1 else stride for size, stride in zip(shape[:-1], strides))
        if qkv_format == "thd":
            space, (of_sequence, of_row) = RowSpace(sequences, shape[0], True), (0, *outer)
        elif qkv_format == "bshd":
            space, (of_sequence, of_row) = RowSpace(shape[0], shape[1], False), outer
        else:
            space, (of_row, of_sequence) = RowSpace(shape[1], shape[0], False), outer
        aligned = alignment % (4 * dtype.itemsize) == 0
        return cls(DTYPE_NAMES[dtype], shape[-2], shape[-1], space, (of_sequence, of_row, of_head), aligned)

    def contiguous(self, qkv_format: str, heads: int, rows: int) -> Heads:
        """The metadata of a contiguous tensor with other ``heads`` and ``rows``, otherwise equal."""
        of_row = heads * self.head_dim
        of_sequence, of_row = {
            "thd": (0, of_row),
            "bshd": (rows * of_row, of_row),
            "sbhd": (of_row, self.space.sequences * of_row),
        }[qkv_format]
        space = self.space._replace(length_or_total=rows)
        return self._replace(heads=heads, space=space, strides=(of_sequence, of_row, self.head_dim), aligned=True)

    def shape(self, qkv_format: str) -> tuple[int, ...]:
        batch, rows = self.space.sequences, self.space.length_or_total
        outer = {"thd": (rows,), "bshd": (batch, rows), "sbhd": (rows, batch)}[qkv_format]
        return *outer, self.heads, self.head_dim

    @property
    def spec(self) -> HeadsSpec:
        """The tensor as kernels that cast it are specialized for."""
        return HeadsSpec.of(self.head_dim, self.dtype, self.strides, self.aligned)

    def cast(self, device: torch.device, copies: tuple[bool, bool], mean_blocks: int = 0) -> CastLaunch:
        return CastLaunch(self.spec, self.heads, self.space, self.strides, copies, mean_blocks, device)

    def transpose(self, device: torch.device) -> TransposeLaunch:
        return TransposeLaunch(self.head_dim, self.heads, self.space, device)


class LaunchedProblem(NamedTuple):
    """The computation of both passes for tensors of one key.

    Attributes:
        qkv_format: the format of all tensors.
        centered: whether a mean of keys is subtracted before they are cast.
        mean_rows: the number of first rows in that mean; None is all.
        kernels: the problem of the launches.
        ragged: whether lengths are passed with each call.
    """

    qkv_format: str
    centered: bool
    mean_rows: int | None
    kernels: AttentionProblem
    ragged: bool

    @classmethod
    def of(cls, q: Heads, k: Heads, call: AttentionCall, ragged: bool) -> LaunchedProblem:
        """The problem of queries (or the output's gradient) and keys."""
        qkv_format, band, centered, longest_query = call.attention
        spec, softmax_scale = AttentionSpec(q.head_dim, q.dtype), call.softmax_scale_of(q.head_dim)
        heads, mask = (q.heads, k.heads), visible(band)
        kernels = AttentionProblem(spec, heads, q.space, k.space, mask, softmax_scale, longest_query)
        return cls(qkv_format, centered, rows_of_mean(band), kernels, ragged)

    @property
    def mean_blocks(self) -> int:
        """The number of blocks of keys whose sums form the subtracted means; 0 if no mean is subtracted."""
        keys = self.kernels.keys
        return (keys.blocks if self.mean_rows is None else keys.sequences) if self.centered else 0

    def tables(self, device: torch.device, backward: bool) -> Callable[[AttentionCall], BatchTables]:
        """Returns a function that maps a call to the tables of a pass. Tables that the call contains are used.

        If no lengths are passed with calls, the tables are made once, on the host: a copy from pageable memory has
        finished when it returns, so any stream may use them.
        """
        spaces, mask = (self.kernels.queries, self.kernels.keys), (self.kernels.visible, self.mean_rows)
        if not self.ragged:
            queries, keys = (packed_rows(space, None, torch.device("cpu")) for space in spaces)
            joined = BatchTables.of(queries, keys, *mask).joined().to(device)
            tables = BatchTables.split(joined, *spaces, self.mean_rows)
            return lambda call: tables

        def of(call: AttentionCall) -> BatchTables:
            if call.tables is not None:
                return BatchTables.split(call.tables, *spaces, self.mean_rows)
            assert call.cu_seqlens_q is not None
            assert call.cu_seqlens_kv is not None
            return BatchTables.of(*rows_on(device, spaces, call.cu_seqlens_q, call.cu_seqlens_kv), *mask, backward)

        return of


def rows_on(
    device: torch.device, spaces: tuple[RowSpace, RowSpace], queries: Tensor, keys: Tensor
) -> tuple[PackedRows, PackedRows]:
    """The packed rows of a batch on ``device``; ``queries`` and ``keys`` are ``cu_seqlens``."""
    of_queries = packed_rows(spaces[0], queries.to(device), device)
    same = keys is queries and spaces[0] == spaces[1]
    return of_queries, of_queries if same else packed_rows(spaces[1], keys.to(device), device)


def visible(band: Band) -> Visible:
    return Visible(band.left, band.right, band.bottom_right)


class _AnyForwardPlan:
    """What the plans of the forward pass share: a cast of queries, and the kernel that runs after all casts.

    Raises:
        KernelError: If a kernel cannot be compiled or loaded.
    """

    def __init__(self, device: torch.device, problem: LaunchedProblem, q: Heads) -> None:
        self._device, self._shape = device, (q.heads, problem.kernels.queries.total)
        self.cast_q, self.tables = q.cast(device, (True, False)), problem.tables(device, backward=False)
        out = q.contiguous(problem.qkv_format, q.heads, q.space.length_or_total)
        self._forward = ForwardLaunch(problem.kernels, out.strides, device)

    def run(
        self, q: Tensor, q8: PackedCodes, k8: PackedCodes, v8: PackedCodes, tables: BatchTables
    ) -> tuple[Tensor, QueriesKept]:
        """``q8`` and ``k8`` have row copies, ``v8`` a transposed one."""
        o = torch.empty(q.shape, dtype=q.dtype, device=self._device)
        m, l = (torch.empty(self._shape, dtype=torch.float32, device=self._device) for _ in range(2))  # noqa: E741
        self._forward.run(tables.tiles_of_queries, q8, k8, v8, o, m, l)
        return o, QueriesKept(m, l, *_kept(q8))


class ForwardPlan(_AnyForwardPlan):
    """The forward pass of tensors. V is cast to rows and columns; the backward pass uses the rows."""

    def __init__(self, device: torch.device, problem: LaunchedProblem, q: Heads, k: Heads, v: Heads) -> None:
        super().__init__(device, problem, q)
        self._cast_k, self._cast_v = k.cast(device, (True, False), problem.mean_blocks), v.cast(device, (True, True))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Kept]:
        tables = self.tables(call)
        q8 = self.cast_q.run(q, tables.queries)
        k8, v8 = self._cast_k.run(k, tables.keys), self._cast_v.run(v, tables.keys)
        o, kept = self.run(q, q8, k8, v8, tables)
        return o, Kept(*kept, *_kept(k8), *_kept(v8))


class ForwardOfCodesPlan(_AnyForwardPlan):
    """The forward pass for FP8 keys and values, with a transposed copy of V's codes."""

    def __init__(self, device: torch.device, problem: LaunchedProblem, q: Heads, k: Heads) -> None:
        super().__init__(device, problem, q)
        self._transpose_v = k.transpose(device)

    def __call__(
        self, q: Tensor, k8: Tensor, k_scale_inv: Tensor, v8: Tensor, v_scale_inv: Tensor, _: int, call: AttentionCall
    ) -> tuple[Tensor, QueriesKept]:
        tables = self.tables(call)
        q8 = self.cast_q.run(q, tables.queries)
        v = self._transpose_v.run(_packed(v8, v_scale_inv))
        return self.run(q, q8, _packed(k8, k_scale_inv), v, tables)


class BackwardPlan:
    """The backward pass: transposed copies of Q's and K's codes, a cast of dO with D, then dQ, and dK with dV.

    Raises:
        KernelError: If a kernel cannot be compiled or loaded.
    """

    def __init__(self, device: torch.device, problem: LaunchedProblem, do: Heads, k: Heads) -> None:
        self._device, self._key_shape = device, k.shape(problem.qkv_format)
        self._transpose_q, self._transpose_k = do.transpose(device), k.transpose(device)
        dq = do.contiguous(problem.qkv_format, do.heads, do.space.length_or_total)
        self._gradient = GradientLaunch(do.spec, do.heads, do.space, do.strides, dq.strides, device)
        self._backward = BackwardLaunch(problem.kernels, dq.strides, k.strides, device)
        self._tables = problem.tables(device, backward=True)

    def __call__(self, do: Tensor, o: Tensor, kept: Kept, key_rows: int, call: AttentionCall) -> Gradients:
        tables = self._tables(call)
        assert tables.tiles_of_keys is not None
        q8 = self._transpose_q.run(_packed(kept.q8, kept.q_scale_inv))
        k8 = self._transpose_k.run(_packed(kept.k8, kept.k_scale_inv))
        o = o.to(torch.bfloat16).contiguous()
        do8, statistics = self._gradient.run(do, tables.queries.blocks, o, kept.m, kept.l, q8)
        operands = Operands(do8, q8, k8, _packed(kept.v8, kept.v_scale_inv))
        dq = torch.empty(do.shape, dtype=do.dtype, device=self._device)
        dk, dv = (torch.empty(self._key_shape, dtype=do.dtype, device=self._device) for _ in range(2))
        self._backward.run_dq(tables.tiles_of_queries, operands, statistics, dq)
        self._backward.run_dkv(tables.tiles_of_keys, operands, statistics, dk, dv)
        return dq, dk, dv


ARCHITECTURES = ("90a", *mma.ARCHITECTURES)
"""Those with kernels of both passes, for heads of :data:`~cuda_kernels.attention.spec.HEAD_DIMS`."""


@torch.compiler.assume_constant_result
def missing_kernel(device: torch.device, head_dim: int) -> str:
    """Why FP8 attention with ``head_dim`` is not supported on ``device``; empty if it is."""
    try:
        architecture = architecture_of(device)
    except NoKernels as error:
        return str(error)
    if architecture in ARCHITECTURES and head_dim in HEAD_DIMS:
        return ""
    return (
        f"FP8 attention has no kernel for heads of {head_dim} channels on {name_of(device)} (sm_{architecture}), only "
        f"for {', '.join(map(str, HEAD_DIMS))} channels on sm_{', sm_'.join(ARCHITECTURES)}"
    )


def require_kernel(device: torch.device, head_dim: int) -> None:
    """Raises:
    KernelError: If the architecture or ``head_dim`` is not supported.
    """
    architecture_of(device)
    if missing := missing_kernel(device, head_dim):
        raise KernelError(
            f"{missing}; fp8_dpa=False in the recipe runs attention in the tensors' own precision, by torch's kernels"
        )


@torch.compiler.assume_constant_result
def failing_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, center_keys: bool = True, of_codes: bool = False
) -> str:
    """Why a kernel that attention needs on ``device`` cannot be compiled or loaded; empty if all can.

    Plans both passes, for tensors aligned to four elements. The kernels depend on nothing else. Allocates no memory
    on the GPU.

    Args:
        dtype: the dtype of queries, keys and values.
        center_keys: whether a mean of keys is subtracted before they are cast.
        of_codes: whether keys and values are gathered as FP8 codes.
    """
    return _failing_kernel(device, dtype, head_dim, center_keys, of_codes)


@cached
def _failing_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, center_keys: bool, of_codes: bool) -> str:
    shape, strides = torch.Size((ROWS, 1, head_dim)), (head_dim, head_dim, 1)
    key = dtype, shape, strides, 0
    call_key = Attention("thd", Band(right=0), center_keys, None).flat, None, 1
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        on_device = device, device.type == "cuda" and current_device()
        plans = {
            "forward pass": _forward_plan(*on_device, key, key, key, call_key),
            "backward pass": _backward_plan(*on_device, key, 1, ROWS, call_key),
        }
        if of_codes:  # a mean over all ranks is subtracted in float32
            of_keys = torch.float32 if center_keys else dtype, torch.Size((1, *shape)), (ROWS * head_dim, *strides), 0
            plans["cast of keys"] = _cast_plan(*on_device, of_keys)
    for which, plan in plans.items():
        if isinstance(plan, Fallback):
            return f"the {which} of FP8 attention does not run on {name_of(device)}: {plan.error}"
    return ""


def _kept(codes: PackedCodes) -> tuple[Tensor, Tensor]:
    assert codes.data is not None
    return codes.data.view(E4M3.dtype), codes.scale_inv


def _packed(data: Tensor, scale_inv: Tensor) -> PackedCodes:
    return PackedCodes(data.view(torch.uint8), None, scale_inv)


def attention_forward_on_cuda(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Kept]:
    q, k, v = map(_with_channels_side_by_side, (q, k, v))
    plan = _forward_plan(
        q.device, q.is_cuda and current_device(), tensor_key(q), tensor_key(k), tensor_key(v), _call_key(call)
    )
    return plan(q, k, v, call)


def attention_backward_on_cuda(do: Tensor, o: Tensor, kept: Kept, key_rows: int, call: AttentionCall) -> Gradients:
    do = _with_channels_side_by_side(do)
    heads = kept.k8.shape[0]
    plan = _backward_plan(do.device, do.is_cuda and current_device(), tensor_key(do), heads, key_rows, _call_key(call))
    return plan(do, o, kept, key_rows, call)


@planned(reference_attention_forward, name="attention_forward")
def _forward_plan(
    device: torch.device, q_key: PlainKey, k_key: PlainKey, v_key: PlainKey, call_key: CallKey
) -> Callable[..., tuple[Tensor, Kept]]:
    call, qkv_format, sequences = _call_of(call_key)
    check_not_empty((*q_key[1], *k_key[1], *v_key[1], sequences))
    q, k, v = (Heads.of(key, qkv_format, sequences) for key in (q_key, k_key, v_key))
    if (k.space, k.heads) != (v.space, v.heads) or q.space.sequences != k.space.sequences:
        raise ValueError(f"keys ({k}) and values ({v}) need equal shapes, and as many sequences as queries ({q})")
    if len({(heads.dtype, heads.head_dim) for heads in (q, k, v)}) > 1:
        raise ValueError(f"queries ({q}), keys ({k}) and values ({v}) need the same dtype and number of channels")
    require_kernel(device, q.head_dim)
    return ForwardPlan(device, LaunchedProblem.of(q, k, call, call_key[2] is not None), q, k, v)


@planned(reference_attention_backward, name="attention_backward")
def _backward_plan(
    device: torch.device, do_key: PlainKey, heads: int, key_rows: int, call_key: CallKey
) -> Callable[..., Gradients]:
    call, qkv_format, sequences = _call_of(call_key)
    check_not_empty((*do_key[1], heads, key_rows, sequences))
    do = Heads.of(do_key, qkv_format, sequences)
    keys = do.contiguous(qkv_format, heads, key_rows)
    require_kernel(device, do.head_dim)
    return BackwardPlan(device, LaunchedProblem.of(do, keys, call, call_key[2] is not None), do, keys)


def attention_cast_on_cuda(x: Tensor) -> tuple[Tensor, Tensor]:
    x = _with_channels_side_by_side(x)
    return _cast_plan(x.device, x.is_cuda and current_device(), tensor_key(x))(x)


def attention_forward_of_codes_on_cuda(
    q: Tensor, k8: Tensor, k_scale_inv: Tensor, v8: Tensor, v_scale_inv: Tensor, key_rows: int, call: AttentionCall
) -> tuple[Tensor, QueriesKept]:
    q = _with_channels_side_by_side(q)
    plan = _forward_of_codes_plan(
        q.device, q.is_cuda and current_device(), tensor_key(q), k8.shape[0], key_rows, _call_key(call)
    )
    return plan(q, k8, k_scale_inv, v8, v_scale_inv, key_rows, call)


@planned(reference_attention_cast, name="attention_cast")
def _cast_plan(device: torch.device, key: PlainKey) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    check_not_empty(key[1])
    x = Heads.of(key, "bshd", 1)
    require_kernel(device, x.head_dim)
    launch = x.cast(device, (True, False))
    tables = CastTables(cast_table(packed_rows(x.space, None, torch.device("cpu"))).to(device))
    return lambda x: _kept(launch.run(x, tables))


@planned(reference_attention_forward_of_codes, name="attention_forward_of_codes")
def _forward_of_codes_plan(
    device: torch.device, q_key: PlainKey, heads: int, key_rows: int, call_key: CallKey
) -> Callable[..., tuple[Tensor, QueriesKept]]:
    call, *_ = _call_of(call_key)
    check_not_empty((*q_key[1], heads, key_rows))
    q = Heads.of(q_key, "bshd", 1)
    keys = q.contiguous("bshd", heads, key_rows)
    require_kernel(device, q.head_dim)
    return ForwardOfCodesPlan(device, LaunchedProblem.of(q, keys, call, False), q, keys)


def _with_channels_side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _call_key(call: AttentionCall) -> CallKey:
    cu_seqlens = call.cu_seqlens_q
    return call.attention.flat, call.softmax_scale, None if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _call_of(call_key: CallKey) -> tuple[AttentionCall, str, int]:
    """The call, its format, and the number of sequences for ``thd``; 1 for formats whose shape contains it."""
    flat, softmax_scale, sequences = call_key
    call = AttentionCall(Attention.from_flat(*flat), softmax_scale)
    if call.attention.qkv_format != "thd":
        return call, call.attention.qkv_format, 1
    if sequences is None:
        raise EmptyTensor  # the specification raises the error for missing lengths
    return call, "thd", sequences


def tables_of_lengths(
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    attention: Attention,
    query_rows: int,
    key_rows: int,
    device: torch.device,
) -> Tensor:
    queries, keys = spaces_of(cu_seqlens_q, cu_seqlens_kv, attention, query_rows, key_rows)
    _, band, _, longest_query = attention
    if longest_query is not None:  # memory was allocated for this length
        wrong = f"cu_seqlens_q has a sequence of more than {longest_query} rows; pass its max_seqlen_q"
        torch._assert_async((cu_seqlens_q.diff() <= longest_query).all(), wrong)  # type: ignore[call-overload]
    of_queries, of_keys = rows_on(device, (queries, keys), cu_seqlens_q, cu_seqlens_kv)
    return BatchTables.of(of_queries, of_keys, visible(band), rows_of_mean(band)).joined()


attention_forward_op.implement("cuda", attention_forward_on_cuda)
attention_backward_op.implement("cuda", attention_backward_on_cuda)
attention_cast_op.implement("cuda", attention_cast_on_cuda)
attention_forward_of_codes_op.implement("cuda", attention_forward_of_codes_on_cuda)
for _device_type in ("cpu", "cuda"):  # of cu_seqlens, which may be on the host
    attention_tables_op.implement(_device_type, tables_of_lengths)
