"""Reads from the source of a module's forward what it does with its children."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache

from torch import nn

_NO_PRODUCT = ("dtype", "device", "shape", "size", "dim", "ndim", "numel", "requires_grad", "is_meta", "data_ptr")
_ALL_CHILDREN = ("children", "modules", "_modules", "apply", "get_submodule")
_ENTRIES = ("forward", "training_step")
_CALL_NO_CHILDREN = ("torch.nn.modules.module", "lightning.", "pytorch_lightning.")
_Uses = dict[str, frozenset[str]]


def reads_weight_only(module: nn.Module, child: str) -> bool:
    """Whether ``module`` reads ``self.<child>.weight`` and never calls, or passes on, ``self.<child>``.

    Judged are the forward, a LightningModule's ``training_step``, and the methods that they reach. False where the
    source is not to be had, or leaves it open: it speaks of ``super`` or of all children, or passes ``self`` on.
    """
    uses = _uses(type(module))  # type: ignore[arg-type]
    return uses is not None and "weight" in uses.get(child, ()) and "module" not in uses[child]


@lru_cache(maxsize=1024)
def _uses(cls: type) -> _Uses | None:
    """For each attribute that the methods read from self: ``"weight"``, ``"module"`` or both; None if it is open."""
    uses_of: dict[str, set[str]] = {}
    methods = [name for name in _ENTRIES if inspect.isfunction(inspect.getattr_static(cls, name, None))]
    for method in methods:  # which grows
        tree = _tree_of(inspect.getattr_static(cls, method))
        if tree is None or _is_open(tree):
            return None
        for attribute, use in _uses_in(tree):
            helper = inspect.getattr_static(cls, attribute, None)
            if not inspect.isfunction(helper):
                uses_of.setdefault(attribute, set()).add(use)
            elif attribute not in methods and not helper.__module__.startswith(_CALL_NO_CHILDREN):
                methods.append(attribute)
    return {attribute: frozenset(uses) for attribute, uses in uses_of.items()}


def _tree_of(function: object) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError, ValueError):
        return None


def _is_open(tree: ast.AST) -> bool:
    """Whether a child may be called where its name does not stand."""
    # What it calls as self(...) is its forward.
    known = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    known |= {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and (node.id == "super" or (node.id == "self" and id(node) not in known)):
            return True
        if isinstance(node, ast.Attribute) and (node.attr in _ALL_CHILDREN or node.attr.startswith("named_")):
            return True
    return False


def _uses_in(tree: ast.AST) -> Iterator[tuple[str, str]]:
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
