"""Finds the norms of unchanged models that FP8 layers alone read, and lets them cast for these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from lightning_fp8.convert.summary import NORM, LayerDecision
from lightning_fp8.modules.fusion.norm import cast_for, is_known_norm
from lightning_fp8.names import clean_name

READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
"""By their names in a block of Hugging Face's Llama: norms, and the layers that read them, in the order of calls."""


def plan_norms(model: nn.Module, decisions: Mapping[str, LayerDecision]) -> tuple[LayerDecision, ...]:
    """For each norm of ``model`` whether it can cast for the layers that read it, and why."""
    modules = {clean_name(name): module for name, module in model.named_modules()}
    return tuple(
        LayerDecision(name, tuple(module.weight.shape), not why_not, why_not or _casts_for(name), NORM)  # type: ignore[arg-type, union-attr]
        for name, module in modules.items()
        if type(module).__name__.endswith("Norm") and getattr(module, "weight", None) is not None
        for why_not in (_why_not(name, module, modules, decisions),)
    )


def fuse_norms(model: nn.Module, norms: Sequence[LayerDecision]) -> None:
    """Retype the norms that were planned to cast, in place."""
    modules = {clean_name(name): module for name, module in model.named_modules()}
    for norm in norms:
        if norm.fp8:
            cast_for(modules[norm.name], [modules[name] for name in _readers(norm.name)])  # type: ignore[misc]


def _readers(name: str) -> list[str]:
    block, _, norm = name.rpartition(".")
    return [f"{block}.{reader}".lstrip(".") for reader in READERS.get(norm, ())]


def _casts_for(name: str) -> str:
    *others, last = (reader.rpartition(".")[2] for reader in _readers(name))
    return f"casts for {', '.join(others)} and {last}"


def _why_not(
    name: str, module: nn.Module, modules: Mapping[str, nn.Module], decisions: Mapping[str, LayerDecision]
) -> str:
    readers = _readers(name)
    if not is_known_norm(module):
        return f"fuse=True knows no {type(module).__name__}"
    if not readers or not all(reader in modules for reader in readers):
        return "fuse=True does not know what reads it"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    in_bf16 = [reader for reader in readers if not (reader in decisions and decisions[reader].fp8)]
    return f"{in_bf16[0].rpartition('.')[2]}, which reads it, runs in BF16" if in_bf16 else ""
