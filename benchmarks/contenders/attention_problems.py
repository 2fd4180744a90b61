"""The problems of suite ``attention``, and their exact results in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8.attention.ops import Band, cast, rows_of_mean

FORWARD, BACKWARD = "forward", "backward"
NAMES = {FORWARD: ("O",), BACKWARD: ("dQ", "dK", "dV")}
"""Results of each pass."""
WITHIN_FP8, WITHIN_BF16 = 0.05, 0.02
"""Relative errors (Frobenius) that pass: for FP8, against exact attention of the rounded inputs, the error of P, dS and
the tensor cores' sums (2.5 % in emulation); for BF16, against that of the inputs."""
ROWS = 1024
"""Queries whose scores are in memory at once."""


@dataclass(frozen=True)
class Problem:
    """Self-attention of normal values in BF16, ``[batch, length, heads, head_dim]``.

    Attributes:
        batch, length, head_dim: see above.
        heads: number of query heads.
        sharing: number of query heads per head of keys and values.
        causal: whether later keys are masked.
        target: targets of the passes, by their names.
    """

    batch: int
    length: int
    heads: int
    head_dim: int
    sharing: int = 1
    causal: bool = False
    target: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.length, self.heads, self.head_dim

    def name(self, what: str) -> str:
        """A name such as ``forward, causal, 4 heads to one of keys``."""
        shared = f", {self.sharing} heads to one of keys" * (self.sharing > 1)
        return what + ", causal" * self.causal + shared

    def flops(self, products: int) -> int:
        """FLOPs of this many products of ``[length, head_dim]`` with scores; half of it if causal.

        FlashAttention counts two for the forward pass and five for the backward pass (Dao, arXiv:2307.08691, section
        4.1), independent of how many a kernel computes.
        """
        whole = 2 * products * self.batch * self.heads * self.length**2 * self.head_dim
        return whole // 2 if self.causal else whole


class Inputs(NamedTuple):
    """BF16 ``[B, L, H, D]``; ``do`` is the gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


def inputs(problem: Problem, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(problem.length + problem.head_dim)
    batch, length, heads, head_dim = problem.shape
    shared = heads // problem.sharing
    return Inputs(
        *(
            torch.randn(batch, length, count, head_dim, generator=generator, device=device, dtype=torch.bfloat16)
            for count in (heads, shared, shared, heads)
        )
    )


# --- In float64 -------------------------------------------------------------------------------------------------------


class Exam:
    """Checks against float64, for the last sequence's last head of keys and the query heads that share it."""

    def __init__(self, problem: Problem, given: Inputs) -> None:
        self._sharing = problem.sharing
        counts = problem.sharing, 1, 1, problem.sharing
        heads = Inputs(*(self._last(x, count) for x, count in zip(given, counts)))
        mean_rows = rows_of_mean(Band(right=0 if problem.causal else None))
        codes = (cast(x[None], x is heads.k, mean_rows=mean_rows) for x in heads)
        self._given = exact(heads, problem.causal)
        self._rounded = exact(Inputs(*(x.dequantize()[0] for x in codes)), problem.causal)

    def errors(self, passing: str, outcome: tuple[Tensor, ...]) -> dict[str, float]:
        """Relative errors against exact attention of the inputs."""
        return self._apart(passing, outcome, self._given)

    def passes(self, passing: str, outcome: tuple[Tensor, ...], fp8: bool) -> bool:
        """Whether all results are finite, and those with exact results are right."""
        errors = self._apart(passing, outcome, self._rounded if fp8 else self._given)
        limit = WITHIN_FP8 if fp8 else WITHIN_BF16
        return all(bool(x.isfinite().all()) for x in outcome) and all(error <= limit for error in errors.values())

    def _apart(self, passing: str, outcome: tuple[Tensor, ...], right: dict[str, Tensor]) -> dict[str, float]:
        found = {}
        for name, x in zip(NAMES[passing], outcome, strict=True):
            of_keys = name in ("dK", "dV")
            actual = self._last(x, 1 if of_keys else self._sharing).double()
            found[name] = float((actual - right[name]).norm() / right[name].norm())
        return found

    @staticmethod
    def _last(x: Tensor, heads: int) -> Tensor:
        """``[B, L, H, D]`` to ``[heads, L, D]``."""
        return x[-1, :, -heads:].transpose(0, 1)


def exact(heads: Inputs, causal: bool) -> dict[str, Tensor]:
    """Attention of queries ``[G, L, D]`` that share a head of keys ``[1, L, D]``, with its gradients: :data:`NAMES`."""
    q, k, v, do = (x.double() for x in heads)
    keys, values, scale = k[0], v[0], q.shape[2] ** -0.5
    o, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    column = torch.arange(k.shape[1], device=k.device)
    for head in range(len(q)):
        for start in range(0, q.shape[1], ROWS):
            rows = slice(start, min(start + ROWS, q.shape[1]))
            scores = q[head, rows] @ keys.T * scale
            if causal:
                scores.masked_fill_(column > column[rows, None], -math.inf)
            p = scores.softmax(-1)
            o[head, rows] = p @ values
            dv[0] += p.T @ do[head, rows]
            ds = p.mul_(do[head, rows] @ values.T - (do[head, rows] * o[head, rows]).sum(-1, keepdim=True))
            dq[head, rows] = ds @ keys * scale
            dk[0] += ds.T @ q[head, rows] * scale
    return {"O": o, "dQ": dq, "dK": dk, "dV": dv}
