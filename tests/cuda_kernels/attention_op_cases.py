"""Attention's ops on a device that runs kernels, from a model's tensors to gradients, against those on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.utils import deterministic

from lightning_fp8.ops.attention import AttentionCall, Band, Kept, attention_config, cpu, cuda
from lightning_fp8.ops.core.dispatch import clear_plan_cache
from tests.cuda_kernels.attention_backward_cases import CODES_THAT_MOVE, error
from tests.cuda_kernels.kernel_cases import Case, assert_same

BF16_ROUNDING = 2.0**-8


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """What no kernel writes is NaN."""
    before = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        deterministic.fill_uninitialized_memory = before[1]


def drawn(
    shape: tuple[int, ...], heads: int, channels: int, seed: int, *, mean: float = 0.0, device: str = "cpu"
) -> Tensor:
    """In BF16, channels side by side but rows not next to each other, as a slice of one projection is."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, 2 * heads, channels, generator=generator) + mean
    return x.bfloat16().to(device)[..., heads:, :]


def check_ops(
    qkv_format: str,
    lengths: list[tuple[int, int]],
    device: str,
    *,
    heads: tuple[int, int] = (1, 1),
    channels: int = 64,
    band: Band = Band(),  # noqa: B008 (frozen)
    tail: int = 0,
    uniform: bool = False,
) -> None:
    """Both ops on ``device``, the second with what the first kept; and the CPU's second with the same.

    Args:
        lengths: of queries and keys of each sequence.
        tail: rows of a padded batch, or behind the last sequence of ``thd``, that belong to no sequence.
        uniform: without ``cu_seqlens``.
    """
    shapes = []
    for each in zip(*lengths):
        rows, batch = (sum(each) if qkv_format == "thd" else max(each)) + tail, len(each)
        shapes.append({"thd": (rows,), "bshd": (batch, rows), "sbhd": (rows, batch)}[qkv_format])
    q, k, v, do = (
        drawn(shapes[which], heads[which], channels, seed, mean=seed == 1, device=device)
        for seed, which in enumerate((0, 1, 1, 0))
    )
    starts = [torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32) for each in zip(*lengths)]
    config, sequences = attention_config(qkv_format, band), () if uniform else tuple(starts)
    right_call = AttentionCall(config, None, *sequences)
    call = AttentionCall(config, None, *(each.to(device) for each in sequences))
    key_rows = shapes[1][1 if qkv_format == "bshd" else 0]

    clear_plan_cache()
    with nan_in_new_memory():
        o, kept = cuda.attention_forward(q, k, v, call)
        gradients = cuda.attention_backward(do, o, kept, key_rows, call)
    clear_plan_cache()

    o, kept = o.cpu(), Kept(*(each.cpu() for each in kept))
    right_o, right = cpu.attention_forward(q.cpu(), k.cpu(), v.cpu(), right_call)
    tolerance = BF16_ROUNDING + CODES_THAT_MOVE[torch.device(device).type]
    assert o.is_contiguous()
    assert error(o, right_o) <= tolerance
    for name in ("q8", "q_scale_inv", "v8", "v_scale_inv"):
        assert_same(getattr(kept, name), getattr(right, name), name)
    assert (kept.k8.view(torch.uint8) != right.k8.view(torch.uint8)).float().mean() < 1e-3, "sums in another order"
    torch.testing.assert_close(kept.k_scale_inv, right.k_scale_inv)
    moves = 1e-3 if device == "cpu" else 2e-2
    torch.testing.assert_close(kept.m, right.m, rtol=moves, atol=moves)
    torch.testing.assert_close(kept.l, right.l, rtol=20 * moves, atol=moves)

    expected = cpu.attention_backward(do.cpu(), o, kept, key_rows, right_call)
    for name, actual, truth in zip(("dq", "dk", "dv"), gradients, expected):
        assert actual.is_contiguous()
        assert error(actual, truth) <= tolerance, name
    if qkv_format == "thd":
        of_queries, of_keys = (int(each[-1]) for each in starts)
        tails = o[of_queries:], gradients[0][of_queries:], gradients[1][of_keys:], gradients[2][of_keys:]
        assert not any(each.any() for each in tails)


def _case(name: str, *args: object, **how: object) -> Case:
    return Case(f"attention_ops-{name}", partial(check_ops, *args, **how))  # type: ignore[arg-type]


CASES = [
    _case(
        "bshd grouped bottom right", "bshd", [(100, 200)], heads=(2, 1), band=Band(right=0, bottom_right=True),
        uniform=True,
    ),
    _case("sbhd window", "sbhd", [(140, 20), (60, 130)], channels=128, band=Band(left=40, right=20), tail=2),
    _case("thd", "thd", [(1, 60), (130, 3), (0, 5), (40, 129)], heads=(2, 2), band=Band(right=0), tail=140),
]  # fmt: skip
