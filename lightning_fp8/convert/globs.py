"""Globs of module names that match nothing: almost always a slip, which would train a layer in FP8 unasked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase


def globs_of_nothing(globs: Iterable[str], layers: Sequence[str], modules: Iterable[str]) -> list[str]:
    """For each glob that no layer's name matches, what is wrong with it, and what was perhaps meant.

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
