"""The schemas of ``quantize`` and ``observe``, what they give on fake and meta tensors, and what all casts share.

Operands are K-major: ``quantize`` takes ``x [R, K]`` and gives, where ``options`` asks for them, the operand of x
(``rowwise``) and the operand of xᵀ (``columnwise``, ``[K, R]``, scaled along R). An operand that was not asked for
comes back empty. Layout ``tensor`` has one scale for both: ``scale_inv_t`` is empty.

A given ``scale``, float32 ``[]``, that is not 0 is used in place of the tensor's own. ``amax``, float32 ``[]``, becomes
``max(amax, max |x|)``. ``overflow_counts``, int64 ``[2]``, grows by the numbers of values that overflowed, and were
saturated, and that underflowed to zero; in the operand of x if that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.ops.core.checks import Described, require, require_contiguous
from lightning_fp8.ops.core.registration import define, fake, implement, refuse_vmap
from lightning_fp8.ops.quantize.options import parse_quantize_options
from lightning_fp8.ops.quantize.outputs import Outputs, fake_outputs

CAST = "str options, Tensor? scale=None, Tensor(a!)? amax=None, Tensor(b!)? overflow_counts=None"
"""The last arguments of every op that casts."""

UNOBSERVED = "_unobserved"
"""Ends the name of an op that casts and takes neither ``amax`` nor ``overflow_counts``."""

OPERANDS = "Tensor data, Tensor scale_inv, Tensor data_t, Tensor scale_inv_t"


CastIO = tuple["Tensor | None", "Tensor | None", "Tensor | None"]
"""The tensors that a cast takes beside its input: ``scale``, ``amax`` and ``overflow_counts``.

A plain tuple: at every call, a NamedTuple would take as long to make as half of a kernel's launch.
"""

NO_IO: CastIO = (None, None, None)


def check_cast_io(device: torch.device, io: CastIO) -> None:
    """Check what a cast on ``device`` takes beside its input.

    Raises:
        TypeError, ValueError: as :func:`require`; ``overflow_counts`` are not contiguous.
    """
    scale, amax, overflow_counts = io
    require_contiguous("overflow_counts", overflow_counts)
    require("scale", scale, torch.float32, (), device)
    require("amax", amax, torch.float32, (), device)
    check_overflow_counts(device, overflow_counts)


def check_overflow_counts(device: torch.device, overflow_counts: Described | None) -> None:
    """Check the dtype, shape and device of ``overflow_counts``.

    Raises:
        TypeError, ValueError: as :func:`require`.
    """
    require("overflow_counts", overflow_counts, torch.int64, (2,), device)


def define_cast(name: str, inputs: str, outputs: str) -> None:
    """Define an op that casts, and the same without what it may write to.

    Inductor leaves operations on E8M0 alone, also the one that stands for what an op may write to, and then fails: what
    gives MXFP8's scales has to be an op that writes nothing.
    """
    define(name, f"({inputs}, {CAST}) -> ({outputs})")
    define(name + UNOBSERVED, f"({inputs}, {CAST.partition(', Tensor(')[0]}) -> ({outputs})")


def implement_cast(name: str, device_type: str, function: Callable[..., Any]) -> None:
    """Register what computes both forms of an op that casts."""
    implement(name, device_type, function)
    implement(name + UNOBSERVED, device_type, function)


def cast_op(cast: Callable[..., Any], num_inputs: int) -> Callable[..., Any]:
    """The op ``(*inputs, options_text, scale, amax, overflow_counts)`` of a ``(*inputs, options_text, io)``."""

    def op(*args: Any, **named: Any) -> Any:
        inputs_and_options = args[: num_inputs + 1]
        io = dict(zip(("scale", "amax", "overflow_counts"), args[num_inputs + 1 :])) | named
        return cast(*inputs_and_options, (io.get("scale"), io.get("amax"), io.get("overflow_counts")))

    return op


define_cast("quantize", "Tensor x", OPERANDS)
define("observe", "(Tensor x, Tensor(a!) amax) -> ()")
refuse_vmap("quantize", "observe")


@fake("quantize", "quantize" + UNOBSERVED)
def _quantize(x: Tensor, options_text: str, *io: Tensor | None) -> Outputs:
    return fake_outputs(x, parse_quantize_options(options_text), x.shape[0], x.shape[1])


@fake("observe")
def _observe(x: Tensor, amax: Tensor) -> None:
    return None
