"""Checks of casts and products on the model's own tensors, in the first two optimizer steps of a process on a GPU.

Kernels have been proven on synthetic tensors before. Here the first call of each kind of cast and product, and each
call that uses a kernel for the first time, is checked on the tensors of the training. torch computes their first and
last rows again, on the GPU, op by op. A wrong result stops training in this call, and its kernels lose their proof.

Norms, activations and attention are not checked, nor calls in inference mode, in evaluations of a Trainer, or during
CUDA graph capture.
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
from lightning_fp8.ops import plans
from lightning_fp8.ops.cast import quantize_columns_op, quantize_op
from lightning_fp8.ops.gemm import scaled_mm_accumulate_op, scaled_mm_observed_op, scaled_mm_op
from lightning_fp8.ops.linear import forget_plans
from lightning_fp8.ops.op import Op
from lightning_fp8.proofs.casts import parts_of_cast, parts_of_columns
from lightning_fp8.proofs.comparing import WrongResult
from lightning_fp8.proofs.products import parts_of_product

STEPS = 2

CHECKS: dict[Op, Callable[..., Callable[[Any], None]]] = {
    quantize_op: parts_of_cast,
    quantize_columns_op: parts_of_columns,
    scaled_mm_op: parts_of_product,
    scaled_mm_observed_op: parts_of_product,
    scaled_mm_accumulate_op: lambda out, *operands: parts_of_product(*operands, out=out),
}
"""By op; called with the op's arguments before it runs, and what this returns with its results."""


class WrongNumbers(RuntimeError):
    """A cast or a product of a training step differs from what torch computes from the same tensors."""


class CheckedCalls:
    """Replaces the implementations of casts and products on a device type until :meth:`end`.

    Attributes:
        paused: calls are not checked.
        num_checked: the number of checked calls.
    """

    def __init__(self, device_type: str = "cuda") -> None:
        self.paused = False
        self.num_checked = 0
        self._models: Iterable[nn.Module] = ()
        self._seen: set[Hashable] = set()
        self._steps: set[int] = set()
        self._device_type = device_type
        self._replaced = {op: (op.implementations[device_type], op.plans.pop(device_type, None)) for op in CHECKS}
        for op, (compute, _) in self._replaced.items():
            op.implementations[device_type] = partial(self._checked, op, compute)
        plans.replan()  # so that kernels are bound again, and noted

    def forward_begins(self, models: Iterable[nn.Module], step: int) -> None:
        """Note whose forward begins, and end after :data:`STEPS` optimizer steps; ``step`` is the last one's number."""
        self._models = models
        self._steps.add(step)
        if len(self._steps) > STEPS:
            self.end()

    def end(self) -> None:
        """Restore the ops' implementations."""
        for op, (compute, plan) in self._replaced.items():
            op.implementations[self._device_type] = compute
            if plan is not None:
                op.plans[self._device_type] = plan
        if self._replaced:
            forget_plans()
        self._replaced, self._models = {}, ()

    @torch.no_grad()
    def _checked(self, op: Op, compute: Callable[..., Any], *args: Any) -> Any:
        empty = any(isinstance(arg, Tensor) and not arg.numel() for arg in args)
        if self.paused or empty or is_capturing() or torch.is_inference_mode_enabled():
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
                self.num_checked += 1
            except WrongResult:
                raise self._error(op.name, args, kernels) from None
            except RuntimeError as error:  # from torch, for example out of memory: no reason to stop training
                text = f"the first {op.name} of its kind was not checked: {error}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
        return results

    def _error(self, op: str, args: Sequence[Any], kernels: Sequence[str]) -> WrongNumbers:
        """End the checks, withdraw the proofs of the kernels, and return the error."""
        operands = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() == 2 and arg.dtype.itemsize == 1]
        shapes = [tuple(operand.shape) for operand in operands or args[:1]]
        call = f"{op} of {' by '.join(str(list(shape)) for shape in shapes)}"
        layers = _layers_of(shapes, self._models)
        self.end()
        for kernel in kernels:
            proofs.withdraw(kernel, f"{call} gave wrong numbers in training")
        by, way_out = _by_whom(op.startswith("scaled_mm"), kernels)
        return WrongNumbers(
            "numbers of the first training steps are not those that torch computes from the same tensors, and training "
            f"is stopped before the optimizer's step: {call} by {by} on {launch.name_of(args[0].device)}{layers}; "
            f"{way_out}"
        )


def _by_whom(is_product: bool, kernels: Sequence[str]) -> tuple[str, str]:
    """What computed the call, and the setting with which training can continue."""
    if kernels:
        variable = "LIGHTNING_FP8_GEMM=cublaslt" if is_product else f"{CARRIED_VARIABLE}={OFF}"
        return ", ".join(kernels), f"{variable} continues without it"
    if is_product:
        return "torch._scaled_mm or plain torch", (
            "LIGHTNING_FP8_GEMM=numba continues with kernels of this package if they support the recipe on this GPU, "
            "and with plain torch for MXFP8; otherwise use another recipe"
        )
    return "compiled plain torch", "TORCH_COMPILE_DISABLE=1 disables torch.compile"


def _layers_of(shapes: Sequence[tuple[int, ...]], models: Iterable[nn.Module]) -> str:
    """Names of parameters that match these shapes, or the gradient of two operands of these shapes."""
    wanted = {*shapes, *(shape[::-1] for shape in shapes), tuple(shape[0] for shape in shapes)}
    names = [name for model in models for name, each in model.named_parameters() if tuple(each.shape) in wanted]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" (parameters of these shapes: {', '.join(names[:3])}{more})" if names else ""


_calls: CheckedCalls | None = None
"""Of this process."""


def begin(models: Iterable[nn.Module], step: int) -> None:
    """Called before a training forward, with the number of the last optimizer step: start or end the checks.

    They start if this process has a GPU and has not run them yet.
    """
    global _calls
    if _calls is None and torch.cuda.is_available() and os.environ.get(proofs.VARIABLE) != "0":
        _calls = CheckedCalls()
    if _calls is not None:
        _calls.forward_begins(models, step)


@contextmanager
def paused() -> Iterator[None]:
    """Context in which nothing is checked."""
    calls = _calls
    if calls is None:
        yield
        return
    calls.paused = True
    try:
        yield
    finally:
        calls.paused = False
