"""``parameters_split``: the names of the parameters that hold a weight's rows, and how many each holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def rows_by_name(parameters_split: Sequence[str] | Mapping[str, int], out_features: int) -> dict[str, int]:
    """Rows of each part, in order; names without the underscores at their ends, which ``_weight`` brings.

    Raises:
        TypeError: neither a sequence of names nor a mapping of names to rows.
        ValueError: parts that are empty, have one name, or do not add up to ``out_features``.
    """
    split: Any = parameters_split
    if isinstance(split, str) or not isinstance(split, (Sequence, Mapping)) or not all(map(_is_name, split)):
        raise TypeError(
            f"parameters_split={split!r} must be a sequence of names or a mapping of name to rows; names have no dots"
        )
    if not split:
        raise ValueError("parameters_split is empty; name at least one part, or pass None")
    names = [name.rstrip("_") for name in split]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"parameters_split names {twice} more than once; give each part a name of its own")
    if isinstance(split, Mapping):
        sizes = list(split.values())
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
            raise ValueError(f"parameters_split={dict(split)} must give each part a positive number of rows")
        if sum(sizes) != out_features:
            raise ValueError(f"parameters_split={dict(split)} must sum to out_features={out_features}")
        return dict(zip(names, sizes))
    if out_features % len(names):
        raise ValueError(f"out_features={out_features} does not divide into {len(names)} equal parts")
    return dict.fromkeys(names, out_features // len(names))


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.strip("_") != "" and "." not in name
