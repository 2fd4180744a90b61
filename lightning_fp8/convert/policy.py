"""The policy of layers that stay in BF16: the first and the last ones, output heads, and those that globs name.

Which layers a model counts as its first and last ones, and which one is its head: ``convert/blocks.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase

from lightning_fp8.arguments import plain, require_bool
from lightning_fp8.convert.blocks import BlockPosition


@dataclass(frozen=True)
class Policy:
    """The layers that stay in BF16. Arguments and errors as for :func:`lightning_fp8.convert_module`."""

    first_last_layers_bf16: bool = True
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1
    replace_layers: bool = True
    skip: Sequence[str] = ()
    fuse: bool = False

    def __post_init__(self) -> None:
        for option in fields(self):
            object.__setattr__(self, option.name, plain(getattr(self, option.name)))
        for field in ("first_last_layers_bf16", "replace_layers", "fuse"):
            require_bool(field, getattr(self, field))
        for field in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{field}={value!r} must be an integer of at least 0")
        a_list = isinstance(self.skip, (Sequence, Set)) and not isinstance(self.skip, (str, bytes, bytearray))
        if not a_list or not all(isinstance(glob, str) for glob in self.skip):
            raise TypeError(f"skip={self.skip!r} must be a sequence of module-name globs, for example ('*.lm_head',)")
        object.__setattr__(self, "skip", tuple(self.skip))  # a list could change


def skipped_by(names: Sequence[str], policy: Policy) -> str:
    """Which glob keeps a module of any of these ``names`` in BF16; empty where none does."""
    matching = (glob for glob in policy.skip if any(fnmatchcase(name, glob) for name in names))
    return next((f"skip={glob!r}" for glob in matching), "")


def reason_for_bf16(place: BlockPosition | None, policy: Policy, head: str = "") -> str:
    """Why a layer stays in BF16 though FP8 could have it; empty where it does not.

    Args:
        place: the layer's, or its block's, among the model's; None outside of them.
        head: why it is an output head; empty for one that is none, or that was made as ``lightning_fp8.Linear``.

    Errors of the first blocks reach all others. Those of the last blocks and of the output head reach the logits
    directly. Together these have few of a deep model's FLOPs. Other projects keep them in BF16, too: DeepSeek-V3
    (arXiv:2412.19437, section 3.3) the embedding and the output head, for their sensitivity to low precision;
    Megatron-LM, with ``--first-last-layers-bf16``, the first and last blocks.
    """
    if head:
        return f"output head: {head}"
    if place is not None and policy.first_last_layers_bf16:
        if place.index < policy.num_layers_at_start_in_bf16:
            return f"{place}, one of the first {policy.num_layers_at_start_in_bf16}"
        if place.index >= place.count - policy.num_layers_at_end_in_bf16:
            return f"{place}, one of the last {policy.num_layers_at_end_in_bf16}"
    return ""


def globs_of_nothing(globs: Iterable[str], layers: Sequence[str], modules: Iterable[str]) -> list[str]:
    """For each glob that no layer's name matches, what is wrong with it, and what was perhaps meant.

    Such a glob is almost always a slip, which would train a layer in FP8 unasked.

    Args:
        globs: as ``fnmatch`` has them; they match whole names.
        layers: names of what could run in FP8.
        modules: names of all modules. A glob may match one that holds none of ``layers``, a norm for example.
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
