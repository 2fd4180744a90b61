"""Liger-Kernel on the CPU: torch code of the same results, in place where they are, instead of its kernels' launches.

It restores what Liger patches: classes and functions of transformers' modules, and torch's cross entropy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

Patch = pytest.MonkeyPatch


def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, mode: str, _: Any) -> tuple[Any, ...]:
    rows = x.view(-1, x.shape[-1])
    wide = rows if mode == "none" else rows.float()
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    normalized = wide * rstd[:, None]
    if mode == "llama":
        normalized = normalized.to(x.dtype)
    y = (normalized * (weight.float() + offset)).to(x.dtype)
    return y.view(x.shape), rows, rstd, 0, 0, mode


def _rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, mode: str, *rest: Any, **_: Any
) -> tuple[Tensor, Tensor]:
    in_place = rest[2]
    rows, wide, rstd = dy.view(-1, x.shape[-1]), x.float(), rstd.float()[:, None]
    m = rows.float() * (weight.float() + offset)
    normalized = (wide * rstd).to(x.dtype if mode == "llama" else torch.float32)
    dx = rstd * m - rstd**3 * wide * (m * wide).mean(-1, keepdim=True)
    dweight = (rows.float() * normalized.float()).sum(0).to(weight.dtype)
    result = rows if in_place else torch.empty_like(rows)
    return result.copy_(dx).view(dy.shape), dweight


def _gated(activation: Any) -> tuple[Any, Any]:
    def forward(a: Tensor, b: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        return a, b, activation(a.float()).to(b.dtype) * b

    def backward(a: Tensor, b: Tensor, dc: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            of = a.float().requires_grad_()
            activated = activation(of)
            (da,) = torch.autograd.grad(activated, of, dc.float() * b.float())
        b.copy_(dc.float() * activated.detach())  # Liger writes over what it saved
        return a.copy_(da), b

    return forward, backward


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In place in memory of ``[batch, length, heads, channels]``, as Liger's kernel."""
    x = x.transpose(1, 2).contiguous()
    half = x.shape[-1] // 2
    one, two = x[..., :half].float(), x[..., half:].float()
    cos, sin = (each[..., None, :half].float() for each in (cos, sin))
    x.copy_(torch.cat((one * cos - two * sin, two * cos + one * sin), -1))
    return x.transpose(1, 2)


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return _rotate(q, cos, sin), _rotate(k, cos, sin), cos, sin


def _rope_backward(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return _rotate(dq, cos, -sin), _rotate(dk, cos, -sin)


def _fused_linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, reduction: str = "mean", ignore_index: int = -100, softcap: Any = None,
    **_: Any,
) -> Tensor:  # fmt: skip
    logits = (x @ weight.to(x.dtype).T).float()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, target, reduction=reduction, ignore_index=ignore_index)


PATCHED = ("RMSNorm", "MLP", "ForCausalLM")
"""Endings of the names of a model's classes that Liger replaces, or whose forward it does."""


@contextmanager
def liger_on_the_cpu(*modelings: Any) -> Iterator[None]:
    """Liger's kernels are torch code, and what it patches in ``modelings``, modules of transformers, is restored."""
    from liger_kernel.ops import geglu, rms_norm, rope, swiglu
    from liger_kernel.transformers import functional

    with Patch.context() as patch:
        for place, name, functions in (
            (rms_norm, "rms_norm", (_rms_norm, _rms_norm_backward)),
            (swiglu, "swiglu", _gated(F.silu)),
            (geglu, "geglu", _gated(lambda x: F.gelu(x, approximate="tanh"))),
            (rope, "rope", (_rope, _rope_backward)),
        ):
            patch.setattr(place, f"{name}_forward", functions[0])
            patch.setattr(place, f"{name}_backward", functions[1])
        patch.setattr(functional, "liger_fused_linear_cross_entropy", _fused_linear_cross_entropy)
        patch.setattr(F, "cross_entropy", F.cross_entropy)
        for modeling in modelings:
            for name, value in [*vars(modeling).items()]:
                if name.endswith(PATCHED) or name == "apply_rotary_pos_emb":
                    patch.setattr(modeling, name, value)
                    if hasattr(value, "forward"):
                        patch.setattr(value, "forward", value.forward)
        yield
