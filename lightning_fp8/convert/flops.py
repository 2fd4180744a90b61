"""Counts the FLOPs of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode
from typing_extensions import Self


class StepFlops(FlopCounterMode):
    """A ``FlopCounterMode`` that does not change the step it counts, and that accumulates if it is entered again.

    It does not register global module hooks, since it only counts the total. It does not disable ``torch.compile``:
    under torch's own mode Dynamo skips every function that it traces, and does not compile it later. In compiled code
    it counts the ops that the code calls, but not products inside generated kernels.

    Attributes:
        failed: whether a formula has raised. The total is then too low.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_ATTENTION)
        self._depth = 0
        self.failed = False

    def __enter__(self) -> Self:
        if not self._depth:
            self.mode = _Counting(self)
            self.mode.__enter__()
        self._depth += 1
        return self

    def __exit__(self, *exception: Any) -> None:
        self._depth -= 1
        if not self._depth and self.mode is not None:
            mode, self.mode = self.mode, None
            mode.__exit__(*exception)

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super()._count_flops(func_packet, out, args, kwargs)
        except Exception:  # the formula does not support these shapes; do not stop training
            self.failed = True
            return out

    @property
    def in_fp8(self) -> int:
        """The FLOPs of the ops of this package, which all multiply in FP8."""
        return sum(flops for op, flops in self.flop_counts["Global"].items() if str(op).startswith("lightning_fp8."))


class _Counting(_FlopCounterMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (isinstance(func, torch._ops.OpOverload) and _has_kernel(func)):
            return super().__torch_dispatch__(func, types, args, kwargs)
        # Unlike torch's mode, do not decompose: the decomposition of silu_backward gives other bits than its kernel.
        kwargs = kwargs or {}
        return self.counter._count_flops(func._overloadpacket, func(*args, **kwargs), args, kwargs)

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
    return 2 * _pairs(q, k) * (q[-1] + v[-1])


def _attention_backward_flops(do: Shape, q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """The FLOPs of five products: the scores again, and the gradients of the scores, q, k and v."""
    return 2 * _pairs(q, k) * (3 * q[-1] + 2 * v[-1])


def _pairs(q: Shape, k: Shape) -> int:
    batch, heads, queries, _ = q
    return batch * heads * queries * k[2]


_ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}{direction}"): formula
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for direction, formula in (("", _attention_flops), ("_backward", _attention_backward_flops))
}
"""torch only counts attention on GPUs, and before 2.12 its formulas raise if queries have more heads than keys."""
