"""Tests that the doctor runs in subprocesses, one in each: what training starts.

Each returns a line that describes what ran, or raises the reason it failed.
"""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch import Tensor

from cuda_kernels.host import launch
from lightning_fp8 import ops
from lightning_fp8.doctor.processes import FP8_CAPABILITY, KERNELS
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.numerics.scaled import Cast, Layout, ScaledTensor
from lightning_fp8.ops.torch_scaled_mm import multiplies_mx_blocks
from lightning_fp8.proofs.kinds import kinds_for

SCALE = 2.0**5
"""Scale of test casts: exact in every format, and large enough to saturate some values."""

OPERANDS = (320, 200), (256, 512), (384, 512)
"""Shapes of the tensors to cast: one for :func:`cast`, and the two operands of :func:`product`."""


def cast() -> str:
    """Test a cast and its transposed copy against torch's cast on the CPU."""
    x = values(*OPERANDS[0])
    nearest = (x.float() * SCALE).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype).float()
    for what, found, wanted in zip(("", "transposed "), quantized(x.to(device())), (nearest, nearest.t())):
        wrong = int((wanted != found.data.cpu().float()).sum())
        if wrong:
            raise ArithmeticError(f"{wrong} of {wanted.numel()} {what}values are not the nearest of {E4M3.name}")
    return f"{list(x.shape)} in bfloat16 to E4M3 and its transpose, all {2 * x.numel():,} values right, on {_name()}"


def product(layout: Layout) -> str:
    """Test a product of FP8 operands against float64.

    Hopper's tensor cores accumulate with about 14 bits (DeepSeek-V3, arXiv:2412.19437); a wrong tile has larger errors
    than rounding to bfloat16 and an accumulator of 11 bits.
    """
    if layout is Layout.MX_1X32 and not multiplies_mx_blocks(device()):
        return "plain torch multiplies it on this GPU: it needs compute capability 10.0 and CUDA 12.8"
    a, b = (quantized(values(*shape).to(device()), layout)[0] for shape in OPERANDS[1:])
    left, right = (operand.dequantize().cpu().double() for operand in (a, b))
    wanted = left @ right.t()
    allowed = wanted.abs() * 2**-8 + (left.abs() @ right.abs().t()) * 2**-10
    off = ((ops.scaled_mm(a, b).cpu().double() - wanted).abs() / allowed).max().item()
    if not off <= 1:  # also where it is NaN
        raise ArithmeticError(f"an error is {off:.3g} times as large as rounding explains, compared with float64")
    return f"{list(a.data.shape)} x {list(b.data.shape)}ᵀ in E4M3 equals float64 within rounding, on {_name()}"


def kernels(*kinds: str) -> str:
    """Run the first case of the proofs of these kinds, as far as the GPU has their kernels."""
    of_gpu = kinds_for(launch.architecture_of(device()))
    with launch.noting() as started:
        for name in kinds:
            if name in of_gpu:
                of_gpu[name].cases()[0].run(str(device()))
    if not started:
        return "torch computes it: this package has no kernel for this GPU"
    return f"right: {', '.join(dict.fromkeys(kernel.name for kernel in started))}, on {_name()}"


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


def has_fp8(where: torch.device) -> bool:
    return where.type == "cuda" and torch.cuda.get_device_capability(where) >= FP8_CAPABILITY


def _name() -> str:
    return torch.cuda.get_device_name(device()) if device().type == "cuda" else "the CPU"


def refuse_fallbacks() -> None:
    """Turn the warnings that a slower fallback runs on a GPU with FP8 tensor cores into errors."""
    if has_fp8(device()):
        fallbacks = r"(An )?FP8 kernels? (do|does) not run|torch\._scaled_mm refuses"
        warnings.filterwarnings("error", fallbacks, RuntimeWarning)


PROBES = {
    "cast": cast,
    "product": partial(product, Layout.TENSOR),
    "product, MXFP8": partial(product, Layout.MX_1X32),
    **{name: partial(kernels, *kinds) for name, kinds in KERNELS.items()},
}
