"""Loading a Transformer Engine checkpoint, all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_fp8.arguments import require_bool, require_mapping, require_module
from lightning_fp8.checkpoint.remap import FP8Roles, Remapped, remap
from lightning_fp8.checkpoint.report import LoadReport
from lightning_fp8.convert.conversion import ConversionSummary
from lightning_fp8.modules.state import fp8_modules, load_fp8_state_dict
from lightning_fp8.names import gemm_name
from lightning_fp8.scaled import LINEAR_ROLES
from lightning_fp8.te.keys import has_te_state
from lightning_fp8.te.unpickle import CheckpointError


def load_te_state_dict(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> LoadReport:
    """Load parameters and FP8 state that Transformer Engine saved, whichever version, into ``model``.

    Nothing of the file is executed. Either everything is loaded or, with an error, nothing.

    Args:
        model: a model of ``lightning_fp8`` modules, or converted by ``convert_module``; other models get the
            parameters alone.
        state_dict: what a model of Transformer Engine modules gave; the whole of a Lightning checkpoint does as well.
        strict: every parameter of one side must be on the other.

    Returns:
        What became of each FP8 state, and which parameters were on one side alone.

    Raises:
        CheckpointError: a damaged or foreign state, or keys or shapes that do not fit; the message names the keys.
        TypeError: ``model`` is no module, ``state_dict`` no mapping, or ``strict`` no bool.
    """
    require_module("load_te_state_dict", model)
    require_mapping("load_te_state_dict", state_dict)
    require_bool("strict", strict)
    nested = state_dict.get("state_dict")
    remapped = remap(nested if isinstance(nested, Mapping) else state_dict, model, fp8_roles_of(model))
    report = check_fit(model, remapped, strict)
    model.load_state_dict(remapped.state_dict, strict=strict)
    if remapped.fp8_state is not None:
        load_fp8_state_dict(model, remapped.fp8_state)
    return report


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
    """Raise before torch loads a part: ``nn.Module.load_state_dict`` copies what fits and complains afterwards.

    Returns:
        The report, with the keys that are on one side alone.

    Raises:
        CheckpointError: missing or unexpected keys (``strict``), or other shapes.
    """
    model_params = model.state_dict()
    file_params = remapped.state_dict
    missing = sorted(model_params.keys() - file_params.keys())
    unexpected = sorted({*file_params.keys() - model_params.keys(), *remapped.beside})
    problems = [
        f"{key} has shape {tuple(file_params[key].shape)} in the file and {tuple(value.shape)} in the model"
        for key, value in model_params.items()
        if isinstance(value, Tensor)
        and isinstance(file_params.get(key), Tensor)
        and file_params[key].shape != value.shape
    ]
    if strict:
        problems += [f"the file lacks {key}" for key in missing]
        problems += [
            f"{key} lies beside the part of the file that is the model's" if key in remapped.beside
            else f"the model lacks {key}"
            for key in unexpected
        ]  # fmt: skip
    if problems:
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        advice = "; strict=False loads what fits" if strict and (missing or unexpected) else ""
        raise CheckpointError(f"the checkpoint does not fit the model: {'; '.join(problems[:20])}{more}{advice}")
    return replace(remapped.report, missing_keys=tuple(missing), unexpected_keys=tuple(unexpected))


def load_hook(
    fp8_roles: Callable[[], FP8Roles], receive: Callable[[dict[str, Any] | None, LoadReport], None]
) -> Callable[..., None]:
    """A load-state pre-hook of a whole model, which takes Transformer Engine's states out of what is being loaded.

    Args:
        fp8_roles: gives the modules that run, or will run, in FP8.
        receive: called with the FP8 state, or None, and the report.
    """

    def hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *_: Any) -> None:
        if prefix or not has_te_state(state_dict):
            return
        remapped = remap(state_dict, module, fp8_roles())
        report = check_fit(module, remapped, strict)
        state_dict.clear()
        state_dict.update(remapped.state_dict)
        receive(remapped.fp8_state, report)

    return hook
