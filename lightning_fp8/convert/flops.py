"""Counts the FLOPs of a training step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode


class StepFlops(_FlopCounterMode):
    """torch's counter of FLOPs without what changes the step that it counts: module hooks, and decompositions.

    It does not disable ``torch.compile``: under torch's own mode Dynamo skips every function that it traces, and does
    not compile it later. In compiled code it counts the ops that the code calls, but not products inside generated
    kernels.

    Attributes:
        failed: whether a formula has raised. The total is then too low.
    """

    def __init__(self) -> None:
        super().__init__(counter=self)  # type: ignore[arg-type]
        self.flop_registry = FlopCounterMode(custom_mapping=_FORMULAS).flop_registry
        self.flop_counts: dict[str, dict[Any, int]] = defaultdict(lambda: defaultdict(int))
        self.failed = False

    @property
    def total(self) -> int:
        """The FLOPs of all products."""
        return sum(self.flop_counts["Global"].values())

    @property
    def in_fp8(self) -> int:
        """The FLOPs of the ops of this package, which multiply in FP8 unless their names say otherwise."""
        counts = self.flop_counts["Global"].items()
        return sum(n for op, n in counts if str(op).startswith("lightning_fp8.") and "in_high_precision" not in str(op))

    def _count_flops(self, packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        try:
            if packet in self.flop_registry:
                self.flop_counts["Global"][packet] += self.flop_registry[packet](*args, **kwargs, out_val=out)
        except Exception:  # the formula does not support these shapes; do not stop training
            self.failed = True
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (isinstance(func, torch._ops.OpOverload) and _has_kernel(func)):
            return super().__torch_dispatch__(func, types, args, kwargs)
        # Unlike torch's mode, do not decompose: the decomposition of silu_backward gives other bits than its kernel.
        kwargs = kwargs or {}
        return self._count_flops(func._overloadpacket, func(*args, **kwargs), args, kwargs)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):  # before torch 2.10

        @classmethod
        def is_infra_mode(cls) -> bool:
            return True


@cache
def _has_kernel(func: torch._ops.OpOverload) -> bool:
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in ("CPU", "CUDA"))


Shape = Sequence[int]


def _attention_flops(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """The FLOPs of two products for each pair of a query and a key. As in torch, masks are ignored."""
    return 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])


def _attention_backward_flops(do: Shape, q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """The FLOPs of five products: the scores again, and the gradients of the scores, q, k and v."""
    return 2 * math.prod(q[:3]) * k[2] * (3 * q[3] + 2 * v[3])


def _grouped_flops(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    """The FLOPs of ``[T, K]`` by ``[E, K, N]``, or of ``[M, T]`` by ``[T, N]``: each of T rows is in one group."""
    return 2 * math.prod(a) * b[-1]


_FORMULAS = {torch.ops.aten._grouped_mm: _grouped_flops} | {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}{direction}"): formula
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for direction, formula in (("", _attention_flops), ("_backward", _attention_backward_flops))
}
"""torch counts no groups, and attention on GPUs only, where before 2.12 more heads of queries than of keys raise."""
