"""Layers whose weights are FP8 codes, as published checkpoints have them: which become ours, and how.

They are recognized by dtypes and names, without imports: the scales are ``weight_scale_inv`` in checkpoints of DeepSeek
and in transformers' ``FP8Linear``, and ``weight_scale`` elsewhere. Both are multiplied by the codes. Those of
transformers' ``FP8Experts`` are beside each of its weights in the same way, ``down_proj_scale_inv`` for example.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from lightning_fp8.arguments import is_dtensor
from lightning_fp8.convert.blocks import is_linear, names_of
from lightning_fp8.convert.policy import Policy, skipped_by
from lightning_fp8.modules.experts import is_experts, swap_experts, weights_of_experts
from lightning_fp8.modules.linear import Linear
from lightning_fp8.modules.swap import calls_own_forward, swap_class, unsharded_class
from lightning_fp8.numerics.formats import E4M3, E8M0_DTYPE, holds_codes
from lightning_fp8.numerics.scaled import Layout
from lightning_fp8.optimizer_steps import before, listen
from lightning_fp8.weights.coded import coded_weight, codes_in
from lightning_fp8.weights.masters import warn_without_masters

SCALES = ("_scale_inv", "_scale")
"""What follows the name of a weight in the name of its scales."""
_SCALE_DTYPES = (torch.float32, torch.bfloat16, E8M0_DTYPE)
_RECIPES = {
    Layout.TENSOR: "recipe='tensorwise' or 'delayed'",
    Layout.ROW: "recipe='rowwise', in the forward",
    Layout.BLOCK_128X128: "recipe='blockwise'",
}


def codes_of(module: nn.Module) -> dict[str, Tensor]:
    """The float8 parameters of ``module`` itself, and its weight if it is a linear layer with a buffer for a weight."""
    own = {"weight": module._buffers.get("weight") if is_linear(module) else None, **module._parameters}
    return {
        name: each
        for name, each in own.items()
        if each is not None and holds_codes(each) and not name.endswith(SCALES) and each.dtype != E8M0_DTYPE
    }


def layout_of_codes(module: nn.Module) -> Layout | None:
    """The layout of the scales of codes that ``module`` multiplies, or could; None if it has none."""
    name = _weights_of(module)[0]
    if (held := codes_in(module._parameters.get(name))) is not None:
        return held.scaling  # type: ignore[no-any-return]
    return _layout_of(module, name) if codes_of(module) and not why_not_codes(module) else None


def _weights_of(module: nn.Module) -> tuple[str, ...]:
    return weights_of_experts(module) if is_experts(module) else ("weight",)


def note_of_codes(layout: Layout, fp8: bool) -> str:
    """What a layer of the table does with codes whose scales have this layout."""
    with_codes = f"frozen FP8 codes, multiplied as they are with {_RECIPES[layout]}; else cast again"
    return with_codes if fp8 else "its FP8 codes are dequantized in each pass"


def why_not_codes(module: nn.Module) -> str:
    """The reason why the codes of ``module`` cannot be multiplied in FP8; an empty string if they can."""
    cls, codes = unsharded_class(module), codes_of(module)
    is_known = cls is nn.Linear or (issubclass(cls, nn.Linear) and cls.__name__ == "FP8Linear") or is_experts(module)
    if codes.keys() != {*_weights_of(module)} or not is_known:
        return f"{cls.__name__} is neither nn.Linear nor FP8Linear with one float8 weight, nor FP8Experts with two"
    if "forward" in vars(module) and not calls_own_forward(module):
        return "its forward was replaced on the instance"
    return next(filter(None, (_why_not(module, name, weight) for name, weight in codes.items())), "")


def _why_not(module: nn.Module, weight_name: str, weight: Tensor) -> str:
    """:func:`why_not_codes` of one weight."""
    name, scale = _scale_of(module, weight_name)
    if weight.is_meta and "_hf_hook" in vars(module):
        return "accelerate offloads its codes and brings them for each forward: load the model without offloading"
    if is_dtensor(weight):
        return "it is sharded already: call convert_module before fully_shard"
    if weight.dtype is not E4M3.dtype or not isinstance(weight, nn.Parameter):
        return f"only unsharded parameters of {E4M3.dtype} can be multiplied"
    if scale is None or scale.dtype not in _SCALE_DTYPES:
        found = "nothing" if scale is None else f"{name} of {scale.dtype}"
        names = " or ".join(weight_name + each for each in SCALES)
        return f"it has {found} for {names} of {', '.join(map(str, _SCALE_DTYPES))}"
    constants = "activation_scale", "input_scale", f"{weight_name}_activation_scale"
    if any(getattr(module, constant, None) is not None for constant in constants):
        return "its inputs have a constant scale, and recipes compute theirs"
    if _layout_of(module, weight_name) is None:
        of = f"{tuple(scale.shape)} and block_size {getattr(module, 'block_size', None)}"
        return f"its {name} of shape {of} has neither one scale, nor one per row, nor one per 128 × 128 block"
    return ""


def _scale_of(module: nn.Module, weight: str) -> tuple[str, Tensor | None]:
    """The name and the values of the scales of a weight; None if there are none."""
    held = {weight + each: getattr(module, weight + each, None) for each in SCALES}
    return next(((name, each) for name, each in held.items() if isinstance(each, Tensor)), ("", None))


def _layout_of(module: nn.Module, weight: str) -> Layout | None:
    """The layout of the scales of a weight; None if there is no such layout."""
    _, scale = _scale_of(module, weight)
    shape = getattr(module, weight).shape
    block = getattr(module, "block_size", None)
    if scale is None or (block is not None and tuple(block) != (128, 128)):
        return None
    if scale.shape == Layout.BLOCK_128X128.scale_shape(*shape):
        return Layout.BLOCK_128X128
    if block is None and scale.numel() == 1:
        return Layout.TENSOR
    return Layout.ROW if block is None and tuple(scale.shape) in ((*shape[:-1], 1), shape[:-1]) else None


def adopt_codes(model: nn.Module, policy: Policy) -> None:
    """Turn the layers of ``model`` that hold FP8 codes into layers of this package with these codes, in place.

    Layers that ``policy`` skips, or does not replace, stay as they are.

    Raises:
        TypeError: If a module that ``policy.skip`` does not match has a float8 parameter that cannot be multiplied.
            Nothing is changed then.
    """
    refused: list[tuple[str, str, nn.Module, str]] = []
    layers: list[nn.Module] = []
    named = zip(names_of(model).values(), model.modules()) if policy.replace_layers else ()
    for names, module in named:
        if not (codes := codes_of(module)):
            continue
        full = [f"{name}.{key}".lstrip(".") for name in names for key in codes]
        if skipped_by(module, names, policy, full):
            continue
        if reason := why_not_codes(module):
            refused.append((full[0], names[0], module, reason))
        else:
            layers.append(module)
    if refused:
        key, name, module, reason = refused[0]
        dtype, cls = next(iter(codes_of(module).values())).dtype, unsharded_class(module).__name__
        config = f"{'CompressedTensors' if cls.startswith('CompressedTensors') else 'FineGrainedFP8'}Config"
        last = {each.rpartition(".")[2] for _, each, _, _ in refused}
        glob = f"*.{last.pop()}" if len(refused) > 1 and len(last) == 1 else name
        more = f" ({len(refused) - 1} more modules are refused)" if len(refused) > 1 else ""
        raise TypeError(
            f"{key} of {type(model).__name__} is {dtype}, codes that cannot be trained on: {reason}{more}. Load the "
            f"model with its weights dequantized, quantization_config={config}(dequantize=True). Or keep such layers "
            f"as they are: skip=({glob!r},), or a module_filter_fn that does not choose them"
        )
    if not layers:
        return
    listen(before, warn_without_masters)  # which refuses to train them
    sizes: Counter[torch.dtype] = Counter()
    for name, each in model.named_parameters():
        if each.is_floating_point() and not holds_codes(each) and not name.endswith(SCALES):
            sizes[each.dtype] += each.numel()
    # Not float32, which adapters have, if others are narrower.
    dtype = max(sizes, key=lambda each: (each.itemsize < 4, sizes[each]), default=torch.bfloat16)
    for module in layers:
        bias = module._parameters.get("bias")
        own = dtype if bias is None else bias.dtype
        for weight in _weights_of(module):
            codes, (name, scale) = getattr(module, weight).detach(), _scale_of(module, weight)
            coded = coded_weight(codes, scale.detach(), name, _layout_of(module, weight), own)  # type: ignore[union-attr, arg-type]
            delattr(module, name)
            module._parameters[weight] = nn.Parameter(coded, requires_grad=False)
        swap_experts(module) if is_experts(module) else swap_class(module, Linear)
