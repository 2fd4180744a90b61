"""Checks of casts and products in the first two optimizer steps on a GPU, once per process.

Kernels have been proven on synthetic tensors before. Here the first call of each kind of cast and product, and each
call that uses a kernel for the first time, is checked on the model's own tensors. torch computes their first and last
rows again, on the GPU, op by op. The results of the comparison stay on the GPU until an optimizer is about to step. An
error stops training, and its kernels lose their proof. After two steps the checks are removed.

Norms, activations and attention are not checked, nor calls in inference mode, in evaluations of a Trainer, or during
CUDA graph capture.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cuda_kernels.device.sizes import ceil_div
from cuda_kernels.host import launch, proofs
from cuda_kernels.host.cache_folder import CARRIED_VARIABLE, OFF
from lightning_fp8.capture import is_capturing
from lightning_fp8.numerics import scaling
from lightning_fp8.numerics.formats import FORMATS, float8_of
from lightning_fp8.numerics.scaled import Cast, ScaledTensor
from lightning_fp8.ops import plans
from lightning_fp8.ops.cast import Outputs, quantize_columns_op, quantize_op, reference_quantize, tensor_amax
from lightning_fp8.ops.gemm import Gemm, scaled_mm_accumulate_op, scaled_mm_observed_op, scaled_mm_op
from lightning_fp8.ops.op import Op

STEPS = 2
ROWS = 128
"""Rows of a part that is computed again: a multiple of every block of scales."""

_FLOAT8 = tuple(float8.dtype for float8 in FORMATS.values())

Check = Callable[[Any], Tensor]
"""Whether the results of a call are right: a bool tensor on the device; does not synchronize."""


class WrongNumbers(RuntimeError):
    """A cast or a product of a training step differs from what torch computes from the same tensors."""


class Look(NamedTuple):
    """A call that was checked.

    Attributes:
        op: the name of the op.
        shapes: the shapes of the operands, or of the tensor that was cast.
        kernels: names of the kernels it was the first to use; empty if a library or plain torch computed it.
        device: the device on which it ran.
        right: a bool tensor, whether its results are correct.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    kernels: tuple[str, ...]
    device: torch.device
    right: Tensor


class FirstSteps:
    """Replaces the implementations of casts and products on a device type until :meth:`end`.

    Attributes:
        paused: calls are not checked.
        stepped_in_backward: an optimizer has stepped during a backward pass, where results are not read.
    """

    def __init__(self, device_type: str = "cuda") -> None:
        self.paused = False
        self.stepped_in_backward = False
        self._looks: list[Look] = []
        self._seen: set[Hashable] = set()
        self._steps = 0
        self._device_type = device_type
        self._replaced = {op: (op.implementations[device_type], op.plans.pop(device_type, None)) for op in CHECKS}
        for op, check in CHECKS.items():
            op.implementations[device_type] = self._looking_at(op, check)
        plans.replan()  # so that kernels are bound again, and noted

    def _looking_at(self, op: Op, check: Callable[..., Check]) -> Callable[..., Any]:
        compute, _ = self._replaced[op]

        def computed(*args: Any) -> Any:
            if self._looks_away(args):
                return compute(*args)
            with torch.no_grad():
                is_right = check(*args)
                with launch.noting() as bound:
                    results = compute(*args)
                kernels = tuple(dict.fromkeys(kernel.name for kernel in bound))
                kinds = (op.name, *(arg.dtype if isinstance(arg, Tensor) else arg for arg in args)), *kernels
                if not self._seen.issuperset(kinds):
                    self._seen.update(kinds)
                    self._look(op.name, args, kernels, lambda: is_right(results))
            return results

        return computed

    def _look(self, op: str, args: Sequence[Any], kernels: tuple[str, ...], is_right: Callable[[], Tensor]) -> None:
        operands = [arg for arg in args if isinstance(arg, Tensor) and arg.dtype in _FLOAT8] or args[:1]
        shapes = tuple(tuple(operand.shape) for operand in operands)
        try:
            self._looks.append(Look(op, shapes, kernels, args[0].device, is_right()))
        except RuntimeError as error:  # from torch, for example out of memory: no reason to stop training
            warnings.warn(f"the first {op} of its kind was not checked: {error}", RuntimeWarning, stacklevel=2)

    def _looks_away(self, args: Sequence[Any]) -> bool:
        empty = any(isinstance(arg, Tensor) and not arg.numel() for arg in args)
        return self.paused or is_capturing() or empty or torch.is_inference_mode_enabled()

    def read(self, models: Iterable[nn.Module]) -> None:
        """Synchronize, and read the results of checks since the last call.

        Raises:
            WrongNumbers: If a check failed. The checks have ended, and the verdicts of the kernels are withdrawn.
        """
        looks, self._looks = self._looks, []
        if not looks:
            return
        if self._device_type == "cuda":
            torch.cuda.synchronize()  # including streams of backward passes
        right = torch.stack([look.right.to(looks[0].device) for look in looks]).tolist()
        wrong = [look for look, is_right in zip(looks, right) if not is_right]
        if wrong:
            self.end()
            raise _error(wrong, models)

    def stepped(self) -> None:
        """Count an optimizer step; the checks end after the second."""
        self._steps += 1
        if self._steps == STEPS:
            self.end()

    def end(self) -> None:
        """Restore the ops' implementations."""
        for op, (compute, plan) in self._replaced.items():
            op.implementations[self._device_type] = compute
            if plan is not None:
                op.plans[self._device_type] = plan
        if self._replaced:
            plans.outdate()
        self._replaced = {}


# --- Once in a process ------------------------------------------------------------------------------------------------

_first_steps: FirstSteps | None = None
_begun = False


def begin(models: Iterable[nn.Module]) -> None:
    """Called before a training forward: start the checks if this process has a GPU and has not run them yet.

    Raises:
        WrongNumbers: If numbers of an optimizer step inside a backward pass were wrong.
    """
    global _first_steps, _begun
    if _first_steps is not None and _first_steps.stepped_in_backward:
        _first_steps.stepped_in_backward = False
        _first_steps.read(models)
        _first_steps.stepped()
    if not _begun and torch.cuda.is_available() and os.environ.get(proofs.VARIABLE) != "0":
        _begun, _first_steps = True, FirstSteps()


def read(models: Iterable[nn.Module]) -> None:
    """Called before an optimizer steps: see :meth:`FirstSteps.read`."""
    if _first_steps is not None:
        _first_steps.read(models)


def stepped() -> None:
    """Called after an optimizer step."""
    if _first_steps is not None:
        _first_steps.stepped()


def steps_in_backward() -> None:
    """Called instead if an optimizer steps during a backward pass: the next forward reads the results."""
    if _first_steps is not None:
        _first_steps.stepped_in_backward = True


@contextmanager
def paused() -> Iterator[None]:
    """Context in which nothing is checked."""
    looking = _first_steps
    if looking is None:
        yield
        return
    looking.paused = True
    try:
        yield
    finally:
        looking.paused = False


# --- What is compared -------------------------------------------------------------------------------------------------


def _parts(size: int) -> list[slice]:
    """The first rows and the last rows; each part starts at a block of scales."""
    last = (size - 1) // ROWS * ROWS
    return [slice(0, min(size, ROWS)), *([slice(last, size)] if last else [])]


def _scales_of(scale_inv: Tensor, dim: int, block: int | None, part: slice) -> Tensor:
    """The scales of a part along ``dim``; ``block`` elements share one, None: all share one."""
    if block is None:
        return scale_inv
    first = part.start // block
    return scale_inv.narrow(dim, first, ceil_div(part.stop, block) - first)


def _equal(actual: Tensor, expected: Tensor) -> Tensor:
    """Bitwise equality, except for NaNs."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return torch.zeros((), dtype=torch.bool, device=expected.device)
    bits = torch.uint8 if actual.element_size() == 1 else torch.int32
    nan = actual.float().isnan() & expected.float().isnan()
    return ((actual.view(bits) == expected.view(bits)) | nan).all()


def _all(conditions: Iterable[Tensor]) -> Tensor:
    return torch.stack([*conditions]).all()


def _specified(x: Tensor, cast: Cast, scale: Tensor | None) -> Outputs:
    with torch.compiler.set_stance("force_eager"):
        return reference_quantize(x, cast, scale, None)


def _check_cast(x: Tensor, cast: Cast, scale: Tensor | None, amax: Tensor | None) -> Check:
    before = None if amax is None else amax.clone()

    def of_rows(results: Outputs, used: Tensor | None, part: slice) -> Iterator[Tensor]:
        layout = cast.layout
        columnwise = cast.columnwise and not layout.has_one_scale_per_row  # these need whole columns
        expected = _specified(x[part], cast.usage(cast.rowwise, columnwise, True), used)
        if cast.rowwise or layout.has_one_scale:
            yield _equal(_scales_of(results.scale_inv, 0, layout.block[0], part), expected.scale_inv)
        if cast.rowwise:
            yield _equal(results.data[part], expected.data)
        if columnwise:
            yield _equal(results.data_t[:, part], expected.data_t)
        if columnwise and not layout.has_one_scale:
            yield _equal(_scales_of(results.scale_inv_t, 1, layout.block[1], part), expected.scale_inv_t)

    def of_columns(results: Outputs, part: slice) -> Iterator[Tensor]:
        expected = _specified(x[:, part], cast.usage(False, True, True), None)
        yield _equal(results.data_t[part], expected.data_t)
        yield _equal(results.scale_inv_t[part], expected.scale_inv_t)

    def check(given: Sequence[Tensor]) -> Tensor:
        results, used = Outputs(*given), scale
        found: list[Tensor] = []
        if cast.layout.has_one_scale and not (scale is not None and cast.scale_is_nonzero):
            options = (cast.power_2_scale, cast.amax_epsilon) if scale is None else ()
            own = scaling.current_scale(tensor_amax(x), cast.float8.max, *options)
            used = own if scale is None else torch.where(scale == 0, own, scale)
        for part in _parts(x.shape[0]):
            found += of_rows(results, used, part)
        if cast.columnwise and cast.layout.has_one_scale_per_row:
            for part in _parts(x.shape[1]):
                found += of_columns(results, part)
        if amax is not None and before is not None:
            found.append(_equal(amax, torch.maximum(before, tensor_amax(x))))
        return _all(found)

    return check


def _check_columns(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Check:
    largest = float8_of(dtype).max

    def of_rows(codes: Tensor, part: slice) -> Tensor:
        return _equal(codes[part], (x[part].float() * scale).clamp(-largest, largest).to(dtype))

    return lambda codes: _all(of_rows(codes, part) for part in _parts(x.shape[0]))


def _check_product(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, gemm: Gemm, bias: Tensor | None = None,
    amax: Tensor | None = None, out: Tensor | None = None,
) -> Check:  # fmt: skip
    """Compare tiles at the corners of the result with float64.

    The error of each row of a tile is at most ``‖exact‖ / 32``, plus a fraction of ``‖|a| |b|ᵀ‖`` for sums that cancel.
    Hopper's short accumulator has relative errors of up to 2 % (DeepSeek-V3, arXiv:2412.19437), and rounding smaller
    ones; a wrong tile has larger ones.
    """
    before = [] if out is None else [out[place].double() for place in _corners(out)]
    slack = 2.0**-8 if gemm.fast_accum else 2.0**-10

    def of_tile(result: Tensor, rows: slice, columns: slice, start: Tensor | None) -> Tensor:
        left, right = (
            ScaledTensor(data[part], _scales_of(scale_inv, 0, layout.block[0], part), layout).dequantize(torch.float64)
            for data, scale_inv, layout, part in (
                (a, scale_a, gemm.layout_a, rows), (b, scale_b, gemm.layout_b, columns),
            )
        )  # fmt: skip
        exact, magnitude = left @ right.t(), left.abs() @ right.abs().t()
        for added in (None if bias is None else bias[columns].double(), start):
            if added is not None:
                exact, magnitude = exact + added, magnitude + added.abs()
        return _near(result[rows, columns], exact, magnitude, slack)

    def check(result: Tensor | None) -> Tensor:
        made = result if out is None else out
        assert made is not None
        places = zip_longest(_corners(made), before)
        return _all(of_tile(made, rows, columns, start) for (rows, columns), start in places)

    return check


def _check_added(out: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, gemm: Gemm) -> Check:
    return _check_product(a, scale_a, b, scale_b, gemm, out=out)


def _corners(result: Tensor) -> list[tuple[slice, slice]]:
    return [(rows, columns) for rows in _parts(result.shape[0]) for columns in _parts(result.shape[1])]


def _near(actual: Tensor, exact: Tensor, magnitude: Tensor, slack: float) -> Tensor:
    """Compare row by row where the exact value is within the result's range; NaN must stay NaN."""
    limits = torch.finfo(actual.dtype)
    beyond = ~(exact.abs() < limits.max)
    off = torch.where(beyond, 0.0, actual.double() - exact).norm(dim=1)
    tiniest = limits.smallest_normal * limits.eps * math.sqrt(actual.shape[1])
    allowed = torch.where(beyond, 0.0, exact).norm(dim=1) / 32
    allowed = allowed + slack * torch.where(beyond, 0.0, magnitude).norm(dim=1) + tiniest
    return (off <= allowed).all() & (actual.isnan() | ~exact.isnan()).all()


CHECKS: dict[Op, Callable[..., Check]] = {
    quantize_op: _check_cast,
    quantize_columns_op: _check_columns,
    scaled_mm_op: _check_product,
    scaled_mm_observed_op: _check_product,
    scaled_mm_accumulate_op: _check_added,
}
"""By op; called with the op's arguments before it runs."""


# --- Messages ---------------------------------------------------------------------------------------------------------


def _error(wrong: Sequence[Look], models: Iterable[nn.Module]) -> WrongNumbers:
    """Withdraw the kernels' proofs, and return the error."""
    models = [*models]
    said = []
    for look in wrong:
        card = launch.name_of(look.device)
        shapes = " by ".join(str(list(shape)) for shape in look.shapes)
        by, way_out = _by_whom(look)
        said.append(f"{look.op} of {shapes} by {by} on {card}{_layers_of(look.shapes, models)}; {way_out}")
        for kernel in look.kernels:
            proofs.withdraw(kernel, f"{look.op} of {shapes} gave wrong numbers in training")
    return WrongNumbers(
        "numbers of the first training steps are not those that torch computes from the same tensors, and training is "
        f"stopped before the optimizer's step: {'. '.join(said)}"
    )


def _by_whom(look: Look) -> tuple[str, str]:
    """What computed the call, and the setting with which training can continue."""
    is_product = look.op.startswith("scaled_mm")
    if look.kernels:
        variable = "LIGHTNING_FP8_GEMM=cublaslt" if is_product else f"{CARRIED_VARIABLE}={OFF}"
        return ", ".join(look.kernels), f"{variable} continues without it"
    if is_product:
        way_out = (
            "LIGHTNING_FP8_GEMM=numba continues with kernels of this package if they support the recipe on this GPU, "
            "and with plain torch for MXFP8; otherwise use another recipe"
        )
        return "torch._scaled_mm or plain torch", way_out
    return "compiled plain torch", "TORCH_COMPILE_DISABLE=1 disables torch.compile"


def _layers_of(shapes: Sequence[tuple[int, ...]], models: Sequence[nn.Module]) -> str:
    """Names of parameters that match these shapes."""
    wanted = {*shapes, *(shape[::-1] for shape in shapes), *_products(shapes)}
    names = [name for model in models for name, each in model.named_parameters() if tuple(each.shape) in wanted]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" (parameters of these shapes: {', '.join(names[:3])}{more})" if names else ""


def _products(shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """The shape of a weight's gradient, from the shapes of its operands."""
    if len(shapes) > 1:
        yield shapes[0][0], shapes[1][0]
