"""Loading a Transformer Engine checkpoint, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_fp8.arguments import require_bool, require_mapping, require_module
from lightning_fp8.convert.summary import ConversionSummary
from lightning_fp8.modules.fused.normed_layer import NormedLayer
from lightning_fp8.modules.state import fp8_modules, load_fp8_state_dict, reset_fp8_scales
from lightning_fp8.names import gemm_name
from lightning_fp8.numerics.formats import CODES_NEED_SCALES, holds_codes
from lightning_fp8.numerics.scaled import LINEAR_ROLES
from lightning_fp8.te.keys import is_state, prefix_of
from lightning_fp8.te.torch_file import CheckpointError
from lightning_fp8.te_checkpoints.remap import FP8Roles, LoadReport, Remapped, first_few, remap
from lightning_fp8.te_checkpoints.tensor_parallel import whole_shapes


def load_te_state_dict(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> LoadReport:
    """Load parameters and FP8 state that any version of Transformer Engine has saved into ``model``.

    No code in the checkpoint is executed. If one of the errors below is raised, nothing was loaded. Errors of a
    module's own ``set_extra_state`` or of hooks are different: they may occur after other modules have been loaded.

    Args:
        model: a model of ``lightning_fp8`` modules, or a model converted by ``convert_module``. For any other model,
            only the parameters are loaded.
        state_dict: the state dict of a model of Transformer Engine modules, or a whole Lightning checkpoint.
        strict: require that the model and ``state_dict`` have the same parameters.

    Returns:
        A report on each FP8 state, and on parameters that are missing from ``state_dict`` or from the model.

    Raises:
        CheckpointError: If a state is damaged or not Transformer Engine's, or if keys, shapes or values do not match.
            The message lists the keys.
        TypeError: If ``model`` is not a module, ``state_dict`` not a mapping, or ``strict`` not a bool.
    """
    require_module("load_te_state_dict", model)
    require_mapping("load_te_state_dict", state_dict)
    require_bool("strict", strict)
    nested = state_dict.get("state_dict")
    own = dict(nested if isinstance(nested, Mapping) else state_dict)
    fp8_state, report = take_te_states(model, own, fp8_roles_of(model), strict)
    model.load_state_dict(own, strict=strict)
    if fp8_state is None:
        reset_fp8_scales(model)
    else:
        load_fp8_state_dict(model, fp8_state)
    return report


def take_te_states(
    model: nn.Module, state_dict: dict[str, Any], fp8_roles: FP8Roles, strict: bool
) -> tuple[dict[str, Any] | None, LoadReport]:
    """Rename ``state_dict`` in place for ``load_state_dict``, and return its FP8 state, or None, and the report."""
    remapped = remap(state_dict, model, fp8_roles)
    report = check_fit(model, remapped, strict)
    state_dict.clear()
    state_dict.update(remapped.state_dict)
    return remapped.fp8_state, report


def fp8_roles_of(model: nn.Module) -> FP8Roles:
    """The modules of ``model`` that run in FP8, and their roles."""
    return {name: module.roles for name, module in fp8_modules(model) if module.fp8}


def planned_fp8_roles(model: nn.Module, plan: ConversionSummary) -> FP8Roles:
    """The modules of ``model`` that will run in FP8 once it is converted as ``plan`` says."""
    linears = {layer.name: layer.fp8 for layer in plan.layers}
    owners = {gemm_name(name, gemm): name for name, module in fp8_modules(model) for gemm in module.gemms}
    planned = {owners.get(name, name) for name in linears}
    return {owners.get(name, name): LINEAR_ROLES for name, fp8 in linears.items() if fp8} | {
        name: roles for name, roles in fp8_roles_of(model).items() if name not in planned
    }


def check_fit(model: nn.Module, remapped: Remapped, strict: bool) -> LoadReport:
    """Check a state dict before loading, because ``nn.Module.load_state_dict`` copies matching keys before it raises.

    Raises:
        CheckpointError: If keys are missing or unexpected (``strict``), if shapes differ, or if torch cannot copy a
            value.
    """
    model_params = model.state_dict()
    file_params = remapped.state_dict
    missing = sorted(model_params.keys() - file_params.keys())
    unexpected = sorted({*file_params.keys() - model_params.keys(), *remapped.beside})
    wholes = whole_shapes(model)  # layers load their shards
    problems = [
        f"{key} {problem}"
        for key, value in model_params.items()
        if key in file_params
        and isinstance(value, Tensor)
        and not is_state(key)  # the module loads it
        and (problem := _misfit(file_params[key], value, wholes.get(key)))
    ]
    if strict:
        beside = [key for key in unexpected if key in remapped.beside]
        problems += _listed("the file lacks", missing)
        problems += _listed("the model lacks", [key for key in unexpected if key not in beside])
        problems += _listed("outside the part of the file that is the model's:", beside)
    if problems:
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        advice = "; strict=False loads what fits" if strict and (missing or unexpected) else ""
        if missing and len(missing) == len(model_params):
            advice = "; no key is the model's: pass its state dict, such as checkpoint['state_dict']"
        raise CheckpointError(f"the checkpoint does not fit the model: {'; '.join(problems[:20])}{more}{advice}")
    note = _note_of_norms(model, file_params)
    return replace(remapped.report, missing_keys=tuple(missing), unexpected_keys=tuple(unexpected), note=note)


def _listed(what: str, keys: list[str]) -> list[str]:
    """A problem with ``keys``, of which the first are named; none without keys."""
    more = f" and {len(keys) - 6} more" if len(keys) > 6 else ""
    return [f"{what} {', '.join(keys[:6])}{more}"] if keys else []


def _misfit(given: Any, own: Tensor, whole: tuple[int, ...] | None) -> str:
    """The reason why torch cannot copy the file's value to the model's, or ``""``."""
    if not isinstance(given, Tensor):
        return f"is a {type(given).__name__} in the file and a tensor in the model"
    for what, x, y in (
        ("on meta, without values,", given.is_meta and not own.is_meta, False),
        ("quantized", given.is_quantized, own.is_quantized),
        ("nested", given.is_nested, own.is_nested),
    ):
        if x != y:
            return f"is {what} in the file and {'' if y else 'not '}in the model"
    if given.layout != own.layout:
        return f"has layout {given.layout} in the file and {own.layout} in the model"
    if given.shape != own.shape and given.shape != whole:
        return f"has shape {tuple(given.shape)} in the file and {tuple(own.shape)} in the model"
    if (own.is_floating_point() and not given.is_floating_point()) or (given.is_complex() and not own.is_complex()):
        return f"is {given.dtype} in the file and {own.dtype} in the model"
    if holds_codes(given) and not holds_codes(own):
        return f"is {given.dtype} in the file and {own.dtype} in the model: {CODES_NEED_SCALES}"
    return ""


def _note_of_norms(model: nn.Module, file_params: Mapping[str, Any]) -> str:
    """The note for norms with gamma whose loaded weights look like gamma - 1, since files do not hold this flag."""
    suspects = []
    for name, module in model.named_modules():
        if isinstance(module, NormedLayer):
            leaf, zero_centered = "layer_norm_weight", module.norm.zero_centered
        else:
            is_norm = isinstance(module, (nn.LayerNorm, nn.RMSNorm))
            leaf, zero_centered = "weight", getattr(module, "zero_centered_gamma", False) or not is_norm
        gamma = file_params.get(f"{prefix_of(name)}{leaf}")
        if not zero_centered and isinstance(gamma, Tensor) and gamma.numel() and float(gamma.float().mean()) < 0.5:
            suspects.append(f"{prefix_of(name)}{leaf}")
    if not suspects:
        return ""
    return (
        f"nearer to 0 than to 1 on average: {first_few(suspects)}; if they were saved with "
        "zero_centered_gamma=True, build the norms with it, too, or add 1"
    )
