"""Checks of casts and products on the model's own tensors, in the first two optimizer steps of a process on a GPU.

Kernels have been proven on synthetic tensors before. Here the first call of each kind of cast and product, and each
call that uses a kernel for the first time, is checked on the tensors of the training. torch computes their first and
last rows again, on the GPU, op by op. A wrong result stops training in this call, and its kernels lose their proof.
Norms, activations, attention, inference mode, evaluations of a Trainer, and CUDA graph capture are left out.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cuda_kernels.host import launch, proofs
from cuda_kernels.host.cache_folder import CARRIED_VARIABLE, OFF
from lightning_fp8.capture import is_capturing
from lightning_fp8.numerics.formats import E4M3, E5M2
from lightning_fp8.ops import plans
from lightning_fp8.ops.cast import quantize_columns_op, quantize_op
from lightning_fp8.ops.gemm import scaled_mm_accumulate_op, scaled_mm_op
from lightning_fp8.ops.grouped import quantize_experts_op
from lightning_fp8.ops.op import Op
from lightning_fp8.proofs.casts import parts_of_cast, parts_of_columns, parts_of_experts
from lightning_fp8.proofs.comparing import WrongResult
from lightning_fp8.proofs.products import parts_of_product

STEPS = 2
CHECKS: dict[Op, Callable[..., Callable[[Any], None]]] = {
    quantize_op: parts_of_cast,
    quantize_columns_op: parts_of_columns,
    quantize_experts_op: parts_of_experts,
    scaled_mm_op: parts_of_product,
    scaled_mm_accumulate_op: lambda out, a, sa, b, sb, gemm: parts_of_product(a, sa, b, sb, gemm, out=out),
}
"""By op; called with the op's arguments before it runs, and what this returns with its results."""


class WrongNumbers(RuntimeError):
    """A cast or a product of a training step differs from what torch computes from the same tensors."""


class CheckedCalls:
    """Checks calls of casts and products on a device type until :meth:`end`; errors name layers of the models."""

    def __init__(self, device_type: str = "cuda") -> None:
        self.models: Iterable[nn.Module] = ()
        self.steps: set[int] = set()
        self._seen: set[Hashable] = set()
        self._before = [(table, dict(table)) for op in CHECKS for table in (op.implementations, op.plans)]
        for op in CHECKS:
            op.plans.pop(device_type, None)
            op.implementations[device_type] = partial(self._checked, op, op.implementations[device_type])
        plans.replan()  # so that kernels are bound again, and noted

    def end(self) -> None:
        """Restore the ops' implementations."""
        while self._before:
            table, before = self._before.pop()
            table.update(before)
        plans.replan()

    @torch.no_grad()
    def _checked(self, op: Op, compute: Callable[..., Any], *args: Any) -> Any:
        empty = any(isinstance(arg, Tensor) and not arg.numel() for arg in args)
        if _paused or empty or is_capturing() or torch.is_inference_mode_enabled():
            return compute(*args)
        check = CHECKS[op](*args)
        with launch.noting() as bound:
            results = compute(*args)
        kernels = tuple(dict.fromkeys(kernel.name for kernel in bound))
        kinds = (op.name, *(arg.dtype if isinstance(arg, Tensor) else arg for arg in args)), *kernels
        if not self._seen.issuperset(kinds):
            self._seen.update(kinds)
            try:
                check(results)
            except WrongResult:
                self.end()
                raise _error(op.name, args, kernels, self.models) from None
            except RuntimeError as error:  # from torch, for example out of memory: no reason to stop training
                warnings.warn(f"the first {op.name} of its kind was not checked: {error}", RuntimeWarning, 2)
        return results


def _error(op: str, args: Sequence[Any], kernels: Sequence[str], models: Iterable[nn.Module]) -> WrongNumbers:
    """Withdraw the proofs of the kernels, and return the error with the setting with which training can continue."""
    operands = [arg for arg in args if isinstance(arg, Tensor) and arg.dtype in (E4M3.dtype, E5M2.dtype)] or args[:1]
    shapes = [tuple(operand.shape) for operand in operands]
    call = f"{op} of {' by '.join(str(list(shape)) for shape in shapes)}"
    for kernel in kernels:
        proofs.withdraw(kernel, f"{call} gave wrong numbers in training")
    by, way_out = "compiled plain torch", "TORCH_COMPILE_DISABLE=1 disables torch.compile"
    if kernels:
        variable = "LIGHTNING_FP8_GEMM=cublaslt" if op.startswith("scaled_mm") else f"{CARRIED_VARIABLE}={OFF}"
        by, way_out = ", ".join(kernels), f"{variable} continues without it"
    elif op.startswith("scaled_mm"):
        by = "torch._scaled_mm or plain torch"
        way_out = (
            "LIGHTNING_FP8_GEMM=numba continues with kernels of this package if they support the recipe on this GPU, "
            "and with plain torch for MXFP8; otherwise use another recipe"
        )
    return WrongNumbers(
        "numbers of the first training steps are not those that torch computes from the same tensors, and training is "
        f"stopped in this call: {call} by {by} on {launch.name_of(args[0].device)}"
        f"{_layers_of(shapes, models)}; {way_out}"
    )


def _layers_of(shapes: Sequence[tuple[int, ...]], models: Iterable[nn.Module]) -> str:
    """Names of parameters that match these shapes, or have the gradient that two operands of these shapes give."""
    wanted = {*shapes, *(shape[::-1] for shape in shapes)}
    if len(shapes) == 2:
        wanted.add((shapes[0][0], shapes[1][0]))
    names = [name for model in models for name, each in model.named_parameters() if tuple(each.shape) in wanted]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" (parameters of these shapes: {', '.join(names[:3])}{more})" if names else ""


_calls: CheckedCalls | None = None
_begun = _paused = False


def begin(models: Iterable[nn.Module], step: int) -> None:
    """Called before a training forward, after optimizer step ``step``: start the checks once, on a GPU, or end them."""
    global _begun, _calls
    if not _begun and torch.cuda.is_available() and os.environ.get(proofs.VARIABLE) != "0":
        _begun, _calls = True, CheckedCalls()
    if _calls is not None:
        _calls.models = models
        _calls.steps.add(step)
        if len(_calls.steps) > STEPS:
            _calls.end()
            _calls = None


@contextmanager
def paused() -> Iterator[None]:
    """Context in which nothing is checked."""
    global _paused
    _paused = True
    try:
        yield
    finally:
        _paused = False
