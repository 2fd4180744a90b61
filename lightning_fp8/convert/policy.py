"""The policy of layers that stay in BF16: first and last layers, output heads, adapters, narrow layers, and ``skip``.

``convert/blocks.py`` finds the first and last layers and the output heads of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any, TypeAlias

from torch import nn

from lightning_fp8.arguments import plain, require_bool
from lightning_fp8.convert.blocks import BlockPosition
from lightning_fp8.names import prefixes

ModuleFilter: TypeAlias = Callable[[nn.Module, str], bool]
"""Called with a linear layer, or experts, which have no ``weight``, or attention, and its name."""
Skip: TypeAlias = Sequence[str | ModuleFilter] | ModuleFilter
"""The modules that stay in BF16: globs of module names, functions that return True for them, or one function."""


NARROW = 64
"""A layer is narrow, and slower in FP8, if its smaller size is at most this and its larger size more than 8 times that.

Examples are LoRA's matrices, routers of experts and networks over coordinates. By the data sheet of an H100 SXM, FP8
saves n * 1.0e-15 s for each value of the input of a product with n features, and casts it in 1.2e-12 s, to two copies.
Both are equal at 1,200 features; torchao's ``_auto_filter_for_recipe`` skips up to 1024. The limit here is lower, so
that it holds on every card, and relative, so that small models keep their layers in FP8. For another limit, pass
``skip=lambda module, name: hasattr(module, "weight") and min(module.weight.shape) <= 1024``.
"""


@dataclass(frozen=True)
class Policy:
    """The layers that stay in BF16. See :func:`lightning_fp8.convert_module` for arguments and errors."""

    first_last_layers_bf16: bool = True
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1
    replace_layers: bool = True
    skip: Skip = ()
    fuse: bool = True
    where_faster: bool = True

    def __post_init__(self) -> None:
        for option in fields(self):
            object.__setattr__(self, option.name, plain(getattr(self, option.name)))
        for field in ("first_last_layers_bf16", "replace_layers", "fuse", "where_faster"):
            require_bool(field, getattr(self, field))
        for field in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{field}={value!r} must be an integer of at least 0")
        skip: Any = (self.skip,) if _is_filter(self.skip) else self.skip
        a_list = isinstance(skip, (Sequence, Set)) and not isinstance(skip, (str, bytes, bytearray))
        if not a_list or not all(isinstance(each, str) or _is_filter(each) for each in skip):
            raise TypeError(
                f"skip={self.skip!r} must be a sequence of module-name globs, for example ('*.lm_head',), or a "
                "function of a module and its name"
            )
        object.__setattr__(self, "skip", tuple(skip))  # the caller could change a list

    @property
    def globs(self) -> list[str]:
        """The globs of ``skip``."""
        return [each for each in self.skip if isinstance(each, str)]  # type: ignore[union-attr]


def _is_filter(value: Any) -> bool:
    """Whether ``value`` is a function that accepts a module and its name."""
    try:
        signature(value).bind(None, "")
    except (TypeError, ValueError):  # ValueError: callables without a signature
        return False
    return not isinstance(value, type)


def skipped_by(module: nn.Module, names: Sequence[str], policy: Policy, gemm_names: Sequence[str] = ()) -> str:
    """The entry of ``policy.skip`` that keeps ``module`` in BF16; empty if there is none.

    Args:
        names: all names of the module. A glob has to match one of them.
        gemm_names: the names of its GEMMs, which globs may match, too.
    """
    for each in policy.skip:  # type: ignore[union-attr]
        if isinstance(each, str):
            if any(fnmatchcase(name, each) for name in (*names, *gemm_names)):
                return f"skip={each!r}"
        elif any(each(module, name) for name in names):
            return f"skip={getattr(each, '__name__', repr(each))}"
    return ""


def reason_for_bf16(place: BlockPosition | None, policy: Policy, head: str = "") -> str:
    """The reason why its position, or being an output head, keeps a layer in BF16; empty if neither does.

    Args:
        place: the position of the layer or its block in the model; None outside of towers.
        head: the reason why the layer is an output head; empty if it is not, or is a ``lightning_fp8.Linear``.

    Errors of the first blocks propagate to all others. Errors of the last blocks and of the output head reach the
    logits directly. In a deep model these layers have few of the FLOPs. Other projects keep them in BF16, too:
    DeepSeek-V3 (arXiv:2412.19437, section 3.3) the embedding and the output head, for their sensitivity to low
    precision; Megatron-LM the first and last blocks, with ``--first-last-layers-bf16``.
    """
    if head:
        return f"output head: {head}"
    if place is not None and policy.first_last_layers_bf16:
        if place.index < policy.num_layers_at_start_in_bf16:
            return f"{place}, one of the first {policy.num_layers_at_start_in_bf16}"
        if place.index >= place.count - policy.num_layers_at_end_in_bf16:
            return f"{place}, one of the last {policy.num_layers_at_end_in_bf16}"
    return ""


def reason_small(name: str, shape: Sequence[int], adapted: Set[str]) -> str:
    """The reason why a layer is too small to be faster in FP8; empty if it is not.

    Args:
        name: the name of the layer.
        shape: ``(out_features, in_features)``.
        adapted: the names of the modules that have adapters, which are those called ``base_layer``, by peft's names.
            Adapters have few FLOPs at any rank, and are the only layers that are trained.
    """
    bases = {"base_layer", *(f"{prefix}.base_layer" for prefix in prefixes(name))} & adapted
    if any(not f"{name}.".startswith(f"{base}.") for base in bases):
        return "an adapter (LoRA) of another layer"
    small, large = sorted(shape)
    if small <= NARROW and large > 8 * small:
        return f"narrow: to cast {large} features takes longer than FP8 saves in a product with {small}"
    return ""


def globs_of_nothing(globs: Iterable[str], layers: Sequence[str], modules: Iterable[str]) -> list[str]:
    """An error message for each glob that matches no layer, with a suggestion.

    Such a glob is almost always a typo, and the layer would silently train in FP8.

    Args:
        globs: patterns of ``fnmatch``, which match whole names.
        layers: the names of the layers that could run in FP8.
        modules: the names of all modules. A glob may match a module without layers, for example a norm.
    """
    problems = []
    for glob in globs:
        if any(fnmatchcase(layer_name, glob) for layer_name in layers):
            continue
        matched = [name for name in modules if fnmatchcase(name, glob)]
        holding = [name for name in matched if any(layer_name.startswith(f"{name}.") for layer_name in layers)]
        if holding:
            problems.append(f"skip={glob!r} matches {holding[0]!r}, but no layer in it; write {glob + '.*'!r}")
        elif not matched:
            problems.append(f"skip={glob!r} matches no module of the model; {_near(glob, layers)}")
    return problems


def _near(glob: str, layers: Sequence[str]) -> str:
    if not layers:
        return "it has no layer that could run in FP8"
    text = glob.strip("*.")
    inside = [layer_name for layer_name in layers if text and (text in layer_name or text.endswith(f".{layer_name}"))]
    near = list(dict.fromkeys(inside + get_close_matches(text, layers, 3, 0.5)))[:3]
    what = "near it are" if near else "layers are called"
    return f"globs match whole names, and {what} {', '.join(map(repr, near or layers[:3]))}"
