"""Tests that the doctor runs in subprocesses, one in each: what training starts.

Each returns a line that describes what ran, or raises the reason it failed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from cuda_kernels.host import launch
from lightning_fp8 import ops
from lightning_fp8.doctor.processes import FP8_CAPABILITY, KERNELS
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.numerics.scaled import Cast, Layout, ScaledTensor
from lightning_fp8.ops.torch_scaled_mm import multiplies_mx_blocks
from lightning_fp8.proofs.comparing import assert_rows_within, assert_same
from lightning_fp8.proofs.kinds import kinds_for

SCALE = 2.0**5
"""Scale of test casts: exact in every format, and large enough to saturate some values."""

OPERANDS = (320, 200), (256, 512), (384, 512)
"""Shapes of the tensors to cast: one for :func:`cast`, and the two operands of :func:`product`."""


def cast() -> str:
    """Test a cast and its transposed copy against torch's cast on the CPU."""
    x = values(*OPERANDS[0])
    nearest = (x.float() * SCALE).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype)
    codes, transposed = quantized(x.to(device()))
    assert_same(codes.data, nearest, "codes")
    assert_same(transposed.data, nearest.t(), "transposed codes")
    return f"{list(x.shape)} in bfloat16 to E4M3 and its transpose, all {2 * x.numel():,} values right, {_where()}"


def product(layout: Layout) -> str:
    """Test a product of FP8 operands against float64."""
    if layout is Layout.MX_1X32 and not multiplies_mx_blocks(device()):
        return "plain torch multiplies it on this GPU: it needs compute capability 10.0 and CUDA 12.8"
    a, b = (quantized(values(*shape).to(device()), layout)[0] for shape in OPERANDS[1:])
    left, right = (operand.dequantize().cpu().double() for operand in (a, b))
    exact, magnitude = left @ right.t(), left.abs() @ right.abs().t()
    assert_rows_within(ops.scaled_mm(a, b).cpu(), exact, magnitude, 2.0**-10, "the product")
    return f"{list(a.data.shape)} x {list(b.data.shape)}ᵀ in E4M3 equals float64 within rounding, {_where()}"


def kernels(*kinds: str) -> str:
    """Run the first case of the proofs of these kinds, as far as the GPU has their kernels."""
    of_gpu = kinds_for(launch.architecture_of(device()))
    with launch.noting() as started:
        for name in kinds:
            if name in of_gpu:
                of_gpu[name].cases()[0].run(str(device()))
    if not started:
        return "torch computes it: this package has no kernel for this GPU"
    return f"right: {', '.join(dict.fromkeys(kernel.name for kernel in started))}, {_where()}"


def quantized(x: Tensor, layout: Layout = Layout.TENSOR) -> tuple[ScaledTensor, ScaledTensor]:
    """The casts that are tested: ``x [R, K]`` in E4M3, and its transpose."""
    scale = x.new_tensor(SCALE).float() if layout.has_one_scale else None
    both = ops.quantize(x, Cast(E4M3, layout), scale=scale, columnwise=True)
    assert both.rowwise is not None
    assert both.columnwise is not None
    return both.rowwise, both.columnwise


def values(rows: int, columns: int) -> Tensor:
    """Bfloat16 ``[rows, columns]`` of both signs; cast with :data:`SCALE`, they range from subnormal to saturated."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    return (x * torch.logspace(-3, 1, columns)).bfloat16()


def device() -> torch.device:
    """The first GPU with FP8 tensor cores, or else the first one, or the CPU."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    index = next((gpu for gpu in gpus if torch.cuda.get_device_capability(gpu) >= FP8_CAPABILITY), 0)
    return torch.device("cuda", index) if gpus else torch.device("cpu")


def has_fp8() -> bool:
    return device().type == "cuda" and torch.cuda.get_device_capability(device()) >= FP8_CAPABILITY


def _where() -> str:
    return f"on {'the CPU' if device().type == 'cpu' else launch.name_of(device())}"


PROBES: dict[str, Callable[[], str]] = {
    "cast": cast,
    "product": partial(product, Layout.TENSOR),
    "product, MXFP8": partial(product, Layout.MX_1X32),
    **{name: partial(kernels, *kinds) for name, kinds in KERNELS.items()},
}


def run(name: str) -> str:
    """Run a probe. Warnings that a slower fallback runs on a GPU with FP8 tensor cores are errors."""
    if has_fp8():
        fallbacks = r"(An )?FP8 kernels? (do|does) not run|torch\._scaled_mm refuses"
        warnings.filterwarnings("error", fallbacks, RuntimeWarning)
    return PROBES[name]()
