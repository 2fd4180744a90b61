"""What a module's forward does with its children, read from its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache

from torch import nn

_NO_PRODUCT = ("dtype", "device", "shape", "size", "dim", "ndim", "numel", "requires_grad", "is_meta", "data_ptr")


def reads_weight_only(module: nn.Module, child: str) -> bool:
    """Whether the forward of ``module`` reads ``self.<child>.weight`` and never calls, or passes on, ``self.<child>``.

    False where the source is not to be had, or leaves it open.
    """
    uses = _uses(type(module))  # type: ignore[arg-type]
    return "weight" in uses.get(child, ()) and "module" not in uses[child]


@lru_cache(maxsize=1024)
def _uses(cls: type) -> dict[str, frozenset[str]]:
    """For each attribute that forward and the methods it reaches read from self: ``"weight"``, ``"module"`` or both."""
    found: dict[str, set[str]] = {}
    methods = ["forward"]
    for method in methods:  # which grows
        function = inspect.getattr_static(cls, method)
        for attribute, use in _uses_in(function):
            if not inspect.isfunction(inspect.getattr_static(cls, attribute, None)):
                found.setdefault(attribute, set()).add(use)
            elif attribute not in methods:
                methods.append(attribute)
    return {attribute: frozenset(uses) for attribute, uses in found.items()}


def _uses_in(function: object) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError, ValueError):
        return
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            user = parents[node]
            if not isinstance(user, ast.Attribute):
                yield node.attr, "module"
            elif user.attr == "weight":
                reader = parents[user]
                if not (isinstance(reader, ast.Attribute) and reader.attr in _NO_PRODUCT):
                    yield node.attr, "weight"
            elif user.attr not in ("bias", "in_features", "out_features"):
                yield node.attr, "module"
