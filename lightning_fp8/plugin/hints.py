"""Repeats the plugin's own errors for arguments in YAML, which a parser hides among the types that it tried."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

import torch

from lightning_fp8.formats import Format
from lightning_fp8.plugin.precision import FP8Precision
from lightning_fp8.recipes import RECIPES, Recipe

_TEXT_FOR_FLAGS = {"true": True, "false": False}


def plugins_in(message: str) -> list[dict[str, Any]]:
    """The arguments of each ``FP8Precision`` that a parser's error ``message`` quotes, once."""
    found = []
    for text in re.findall(r"Given value: (\{'class_path': '[\w.]*\bFP8Precision'.*\})$", message, re.MULTILINE):
        try:
            arguments = ast.literal_eval(text).get("init_args", {})
        except (ValueError, SyntaxError):  # it quotes an object
            continue
        if arguments not in found:
            found.append(arguments)
    return found


def complaints(plugins: Iterable[Mapping[str, Any]]) -> str:
    """The errors that ``FP8Precision`` raises for ``plugins``, its arguments as YAML has them; empty without any."""
    return "\n".join(filter(None, map(_complaint, plugins)))


def _complaint(arguments: Mapping[str, Any]) -> str:
    valid = list(signature(FP8Precision).parameters)
    for name in arguments:
        if name not in valid:
            return f"FP8Precision has no argument {name!r}; its arguments are {', '.join(valid)}"
    recipe = arguments.get("recipe")
    fp8_format = recipe.get("init_args", recipe).get("fp8_format") if isinstance(recipe, Mapping) else None
    if isinstance(fp8_format, str) and fp8_format not in Format.__members__:
        return f"fp8_format={fp8_format!r} is not one of {', '.join(Format.__members__)}, which YAML has in upper case"
    try:
        FP8Precision(**{name: _read(name, value) for name, value in arguments.items()})
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def _read(name: str, value: Any) -> Any:
    """``value`` as the parser would have understood it."""
    if name == "recipe" and isinstance(value, Mapping):
        fields = {field: _read(field, given) for field, given in value.get("init_args", value).items()}
        if "class_path" not in value:
            return fields
        return _recipe_class(value["class_path"])(**fields)
    if name.endswith("_dtype") and isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."), value)
    return _TEXT_FOR_FLAGS.get(value.lower(), value) if isinstance(value, str) else value


def _recipe_class(path: Any) -> type[Recipe]:
    for cls in RECIPES.values():
        if path in (cls.__name__, f"lightning_fp8.{cls.__name__}", f"{cls.__module__}.{cls.__name__}"):
            return cls
    known = ", ".join(f"lightning_fp8.{cls.__name__}" for cls in RECIPES.values())
    raise ValueError(f"class_path={path!r} is not a recipe; use one of {known}")
