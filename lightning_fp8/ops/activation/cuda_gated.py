"""Activations that a second CUDA tensor multiplies, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuda_kernels.casts.gated import gated_backward_loader, gated_loader
from cuda_kernels.device.tile import TileLoader
from cuda_kernels.host import launch
from lightning_fp8.ops.activation import reference
from lightning_fp8.ops.activation.schema import parse_activation_options
from lightning_fp8.ops.core.checks import require
from lightning_fp8.ops.core.dispatch import Op, check_not_empty, current_device, planned
from lightning_fp8.ops.core.options import DTYPE_NAMES, HIGH_PRECISION
from lightning_fp8.ops.core.tensor_keys import KeyAndDevice, TensorKey, key_and_device
from lightning_fp8.ops.quantize.launches import cast_launches, cast_variant, overflow_counts_key
from lightning_fp8.ops.quantize.outputs import Outputs, with_kernel_strides
from lightning_fp8.ops.quantize.schema import cast_op, implement_cast


def _planned(reference_op: Op, loader_of: Callable[[str, str, bool], TileLoader], names: tuple[str, ...]) -> Op:
    """The op ``(*tensors, options_text, scale, amax, overflow_counts)`` that casts what a loader computes of tensors.

    Args:
        reference_op: ``(*tensors, options_text, io)``, computes the same without kernels.
        loader_of: an activation's name, a dtype and whether rows begin at vectors, to the loader of the values.
        names: of the tensors, which have the shape and dtype of ``x``.
    """

    @planned(fallback=with_kernel_strides(reference_op))
    def plan(device: torch.device, plain_keys: tuple[KeyAndDevice, ...], options_text: str, *given: Any) -> Op:
        tensor_keys = [TensorKey(*key) for key in plain_keys]
        x_key = tensor_keys[names.index("x")]
        variant = cast_variant(device, options_text, *given)
        require("x", x_key, HIGH_PRECISION, x_key.shape, device)
        for name, tensor_key in zip(names, tensor_keys):
            require(name, tensor_key, x_key.dtype, x_key.shape, device)
        check_not_empty(x_key.shape)
        if not all(tensor_key.has_contiguous_rows for tensor_key in tensor_keys):
            return lambda *args: run(*(tensor.contiguous() for tensor in args[:-2]), *args[-2:])
        aligned = all(tensor_key.is_vectorizable(4) for tensor_key in tensor_keys)
        loader = loader_of(parse_activation_options(options_text).name, DTYPE_NAMES[x_key.dtype], aligned)
        launches = cast_launches(variant.options.layout)(device, loader, x_key.rows, x_key.columns, variant).cast
        pointer = launch.address_on(device)
        strides = [tensor_key.stride for tensor_key in tensor_keys]

        def launch_cast(*args: Any) -> Outputs:
            pairs = zip(args, strides)
            return launches([number for tensor, stride in pairs for number in (pointer(tensor), stride)], args[-1])

        return launch_cast

    def run(*args: Any) -> Outputs:
        *tensors, options_text, (scale, amax, overflow_counts) = args
        x = tensors[names.index("x")]
        outputs: Outputs = plan(
            x.device, x.is_cuda and current_device(), tuple(map(key_and_device, tensors)), options_text,
            scale is not None, amax is not None,
            None if overflow_counts is None else overflow_counts_key(overflow_counts),
        )(*args)  # fmt: skip
        return outputs

    return cast_op(run, len(names))


gated_quantize = _planned(reference.activate_gated, gated_loader, ("x", "factor"))
gated_backward_quantize = _planned(reference.activate_gated_backward, gated_backward_loader, ("dy", "x", "factor"))

implement_cast("gated_quantize", "cuda", gated_quantize)
implement_cast("gated_backward_quantize", "cuda", gated_backward_quantize)
