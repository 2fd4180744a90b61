"""Tests that the doctor runs in subprocesses: ``python -m lightning_fp8.doctor.probes PROBE SECONDS``.

Each imports torch, or a compiler, by itself.
"""

from __future__ import annotations

import faulthandler
import json
import math
import sys
import warnings
from typing import TYPE_CHECKING, Any

from lightning_fp8.doctor.processes import MARK

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lightning_fp8.numerics.scaled import ScaledTensor

FP8_CAPABILITY = (8, 9)
"""The first compute capability with FP8 tensor cores (Ada)."""
MX_CAPABILITY = (10, 0)
"""The first compute capability with tensor cores for MXFP8 (Blackwell)."""

SCALE = 2.0**5
"""Scale of test casts: exact in every format, and large enough to saturate some values."""

OPERANDS = (320, 200), (256, 512), (384, 512)
"""Shapes of the tensors to cast: one for :func:`cast`, and the two operands of :func:`product`."""


def torch_facts() -> str:
    """JSON: torch's version, its CUDA version (null without CUDA), the GPUs, and torch's error if there are none."""
    import torch

    facts: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": [], "problem": ""}
    try:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            facts["gpus"].append((gpu.name, (gpu.major, gpu.minor), gpu.total_memory))
    except Exception as error:  # the type varies; a build without CUDA raises AssertionError
        facts["problem"] = str(error).strip().splitlines()[0]
    return json.dumps(facts)


def compilation() -> str:
    """Compile one kernel for Hopper without torch; the caller passes an empty cache."""
    from cuda_kernels.casts.amax import amax_kernel
    from cuda_kernels.device.tile import tensor_loader
    from cuda_kernels.host import compile_cache

    kernel = amax_kernel(tensor_loader("bfloat16", True), True)
    return f"{kernel.name} for sm_90a: {len(compile_cache.cubin(kernel, '90a')):,} bytes of machine code"


def cast() -> str:
    """Test a cast and its transposed copy against torch's cast on the CPU.

    Raises:
        ArithmeticError: If a value differs.
    """
    from lightning_fp8.numerics.formats import E4M3

    x = values(*OPERANDS[0])
    codes, transposed = quantized(x.to(device()))
    nearest = (x.float() * SCALE).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype).float()
    for what, found, wanted in (("", codes, nearest), ("transposed ", transposed, nearest.t())):
        wrong = int((wanted != found.data.cpu().float()).sum())
        if wrong:
            raise ArithmeticError(f"{wrong} of {wanted.numel()} {what}values are not the nearest of {E4M3.name}")
    return f"{list(x.shape)} in bfloat16 to E4M3 and its transpose, all {2 * x.numel():,} values right, on {_name()}"


def product() -> str:
    """Test a product of FP8 operands against float64.

    Hopper's tensor cores accumulate with about 14 bits (DeepSeek-V3, arXiv:2412.19437); a wrong tile has larger errors.

    Raises:
        ArithmeticError: If an error exceeds that of rounding to bfloat16 and of an accumulator of 11 bits.
    """
    return _product_of(*(quantized(values(*shape).to(device()))[0] for shape in OPERANDS[1:]))


def _product_of(a: ScaledTensor, b: ScaledTensor) -> str:
    from lightning_fp8 import ops

    left, right = (operand.dequantize().cpu().double() for operand in (a, b))
    wanted = left @ right.t()
    allowed = wanted.abs() * 2**-8 + (left.abs() @ right.abs().t()) * 2**-10
    off = ((ops.scaled_mm(a, b).cpu().double() - wanted).abs() / allowed).max().item()
    if not off <= 1:  # also where it is NaN
        raise ArithmeticError(f"an error is {off:.3g} times as large as rounding explains, compared with float64")
    return f"{list(a.data.shape)} x {list(b.data.shape)}ᵀ in E4M3 equals float64 within rounding, on {_name()}"


def block_product() -> str:
    """Test a blockwise product, 1 × 128 blocks by 128 × 128 blocks, against float64.

    Raises:
        ArithmeticError: If an error exceeds the bound of :func:`product`.
    """
    from lightning_fp8 import ops
    from lightning_fp8.numerics.formats import E4M3
    from lightning_fp8.numerics.scaled import Cast, Layout

    a, b = (
        ops.quantize(values(*shape).to(device()), Cast(E4M3, layout)).rowwise
        for shape, layout in zip(OPERANDS[1:], (Layout.BLOCK_1X128, Layout.BLOCK_128X128))
    )
    assert a is not None
    assert b is not None
    return _product_of(a, b)


def mx_product() -> str:
    """Test a product of MXFP8, blocks of 1 × 32, against float64, if ``torch._scaled_mm`` multiplies it.

    Raises:
        ArithmeticError: If an error exceeds the bound of :func:`product`.
    """
    from lightning_fp8 import ops
    from lightning_fp8.numerics.formats import E4M3
    from lightning_fp8.numerics.scaled import Cast, Layout
    from lightning_fp8.ops.torch_scaled_mm import multiplies_mx_blocks

    if not multiplies_mx_blocks(device()):
        return "plain torch multiplies it on this GPU: it needs compute capability 10.0 and CUDA 12.8"
    a, b = (ops.quantize(values(*shape).to(device()), Cast(E4M3, Layout.MX_1X32)).rowwise for shape in OPERANDS[1:])
    assert a is not None
    assert b is not None
    return _product_of(a, b)


def scales() -> str:
    """Test the update of delayed scales against its formula.

    Raises:
        ArithmeticError: If a scale, or an amax in the history, differs.
    """
    import torch

    from lightning_fp8 import ops
    from lightning_fp8.numerics.formats import E4M3

    tensors, length = 70, 16
    largest = torch.full((tensors,), E4M3.max)
    generator = torch.Generator().manual_seed(0)
    amax, history = (torch.rand(*shape, generator=generator) + 0.1 for shape in ((tensors,), (length, tensors)))
    history[0] = 0.0  # the next amax is stored here
    found, scale = history.to(device(), copy=True), torch.ones(tensors).to(device())
    ops.update_scales(amax.to(device(), copy=True), found, scale, largest.to(device()), 0.0, "max")
    wanted = torch.cat([history[:1], history[2:], amax[None]])
    wrong_scales = scale.cpu() != largest / torch.maximum(amax, history.amax(0))
    wrong = int(wrong_scales.sum()) + int((found.cpu() != wanted).sum())
    if wrong:
        raise ArithmeticError(f"{wrong} of {tensors} scales and {history.numel()} amaxes are wrong")
    return f"{tensors} scales of histories of {length} steps, all right, on {_name()}"


def norm() -> str:
    """Test LayerNorm's cast and its gradients against torch's layer_norm in float64.

    Raises:
        ArithmeticError: If a row or a gradient has a larger error than FP8 (output) or bfloat16 (gradients) explains.
    """
    import torch
    import torch.nn.functional as F

    from lightning_fp8 import ops
    from lightning_fp8.numerics.formats import E4M3
    from lightning_fp8.numerics.scaled import Cast, Layout

    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(200, 1024, generator=generator).bfloat16() for _ in range(2))
    weight, bias = (torch.randn(1024, generator=generator).bfloat16() for _ in range(2))
    exact = [each.double().requires_grad_() for each in (x, weight, bias)]
    wanted = F.layer_norm(exact[0], (1024,), exact[1], exact[2], 1e-5)
    wanted.backward(dy.double())
    x, weight, bias, dy = (each.to(device()) for each in (x, weight, bias, dy))
    made = ops.norm_quantize(x, weight, bias, Cast(E4M3, Layout.TENSOR), eps=1e-5)
    assert made.operands.rowwise is not None
    _require_close("y", made.operands.rowwise.dequantize(), wanted.detach(), 0.05)
    found = ops.norm_backward(dy, x, weight, made.statistics, bias_gradient=True)
    for name, gradient, of in zip(("x", "weight", "bias"), found, exact):
        assert gradient is not None
        assert of.grad is not None
        _require_close(f"the gradient of {name}", gradient, of.grad, 0.01)
    return f"LayerNorm of {list(x.shape)} and its gradients equal float64 within rounding, on {_name()}"


def attention() -> str:
    """Test causal attention and its gradients against float64.

    Raises:
        ArithmeticError: If a result has a larger error than FP8 explains.
    """
    import torch

    from lightning_fp8.attention.function import fp8_attention
    from lightning_fp8.attention.ops import Band, missing_kernel

    generator = torch.Generator().manual_seed(0)
    *qkv, do = (torch.randn(1, 256, 2, 128, generator=generator).bfloat16() for _ in range(4))
    exact = [x.double().requires_grad_() for x in qkv]
    q, k, v = (x.transpose(1, 2) for x in exact)
    scores = (q @ k.mT / 128**0.5).masked_fill(torch.ones(256, 256, dtype=torch.bool).triu(1), -torch.inf)
    wanted = (scores.softmax(-1) @ v).transpose(1, 2)
    wanted.backward(do.double())
    on_device = [x.to(device()).requires_grad_() for x in qkv]
    if reason := missing_kernel(device(), qkv[0].shape[-1]):
        return f"runs in high precision: {reason}"
    o = fp8_attention(*on_device, band=Band(right=0))
    o.backward(do.to(device()))
    _require_close("o", o.detach(), wanted.detach(), 0.2, rows=1)
    for name, found, of in zip("qkv", on_device, exact):
        assert found.grad is not None
        assert of.grad is not None
        _require_close(f"the gradient of {name}", found.grad, of.grad, 0.15)
    return f"{list(o.shape)} and its gradients equal float64 within FP8's rounding, on {_name()}"


def _require_close(what: str, found: Tensor, wanted: Tensor, allowed: float, rows: int = 32) -> None:
    """Compare relative errors of groups of ``rows`` rows.

    Raises:
        ArithmeticError: If a group's error exceeds ``allowed``, or a value is NaN.
    """
    found, wanted = (x.cpu().double().reshape(-1, x.shape[-1]) for x in (found, wanted))
    pairs = zip(found.split(rows), wanted.split(rows))
    off = max(((one - other).norm() / other.norm()).nan_to_num(nan=math.inf).item() for one, other in pairs)
    if not off <= allowed:
        raise ArithmeticError(
            f"{what} differs from float64 by up to {off:.1%}, but rounding explains only {allowed:.0%}"
        )


def quantized(x: Tensor) -> tuple[ScaledTensor, ScaledTensor]:
    """The cast tested by :func:`cast` and :func:`product`: ``x [R, K]`` in E4M3, and its transpose."""
    from lightning_fp8 import ops
    from lightning_fp8.numerics.formats import E4M3
    from lightning_fp8.numerics.scaled import Cast, Layout

    both = ops.quantize(x, Cast(E4M3, Layout.TENSOR), scale=x.new_tensor(SCALE).float(), columnwise=True)
    assert both.rowwise is not None
    assert both.columnwise is not None
    return both.rowwise, both.columnwise


def values(rows: int, columns: int) -> Tensor:
    """Bfloat16 ``[rows, columns]`` of both signs; cast with :data:`SCALE`, they range from subnormal to saturated."""
    import torch

    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    return (x * torch.logspace(-3, 1, columns)).bfloat16()


def device() -> torch.device:
    """The first GPU with FP8 tensor cores, or else the first one, or the CPU."""
    import torch

    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    index = next((gpu for gpu in gpus if torch.cuda.get_device_capability(gpu) >= FP8_CAPABILITY), 0)
    return torch.device("cuda", index) if gpus else torch.device("cpu")


def has_fp8(where: torch.device) -> bool:
    import torch

    return where.type == "cuda" and torch.cuda.get_device_capability(where) >= FP8_CAPABILITY


def _name() -> str:
    import torch

    return torch.cuda.get_device_name(device()) if device().type == "cuda" else "the CPU"


def refuse_fallbacks() -> None:
    """Turn the warnings that a slower fallback runs on a GPU with FP8 tensor cores into errors."""
    if has_fp8(device()):
        fallbacks = r"(An )?FP8 kernels? (do|does) not run|torch\._scaled_mm refuses"
        warnings.filterwarnings("error", fallbacks, RuntimeWarning)


KERNELS = {"product of blocks": block_product, "scales": scales, "norm": norm, "attention": attention}
"""Probes of kernels other than casts and plain products."""
PROBES = {
    "torch": torch_facts, "compile": compilation, "cast": cast, "product": product, "MXFP8 product": mx_product,
    **KERNELS,
}  # fmt: skip
"""Each returns a line that describes what ran, or raises the reason it failed."""


def run_probe(name: str, seconds: str) -> None:
    """Print the probe's result, or exit with its error. The stack is dumped shortly before the time limit."""
    faulthandler.dump_traceback_later(0.9 * float(seconds))
    try:
        if name not in ("torch", "compile"):
            refuse_fallbacks()
        print(f"\n{MARK}{PROBES[name]()}")
    except Exception as error:
        raise SystemExit(f"\n{MARK}{type(error).__name__}: {' '.join(str(error).split())}") from None
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    run_probe(*sys.argv[1:])
