"""Short error messages for wrong arguments of the plugins in YAML, in every program that uses jsonargparse.

A parser tries each type of an argument, and reports all of them: for a wrong recipe name, a LightningCLI prints a
screen of usage and a screen of types. jsonargparse has no hook for the messages of a class, so two methods of its
parsers are wrapped. Errors that are not about a plugin do not change.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import Any, NoReturn

from lightning_fp8.numerics.recipes import RECIPES, Recipe
from lightning_fp8.plugin.fabric import FP8FabricPrecision

Spec = tuple[type[FP8FabricPrecision], Mapping[str, Any]]
"""The class of a plugin and its arguments, as YAML has them."""

_TEXT_FOR_FLAGS = {"true": True, "false": False}


def extend_parsers() -> None:
    """Let jsonargparse's parsers, if it is installed, report wrong arguments of a plugin with :func:`complaints`.

    A program ends with exit status 2, as after any error of a parser, without the usage.
    """
    try:
        from jsonargparse import ArgumentParser
    except ImportError:
        return
    report, instantiate = ArgumentParser.error, ArgumentParser.instantiate_classes

    @wraps(report)
    def error(self: ArgumentParser, message: str, *args: Any, **kwargs: Any) -> NoReturn:
        said = complaints(plugins_in_message(message)) or misnamed(message)
        if said and self.exit_on_error:
            self.exit(2, f"error: {said}\n")
        report(self, said or message, *args, **kwargs)

    @wraps(instantiate)
    def instantiate_classes(self: ArgumentParser, cfg: Any, **kwargs: Any) -> Any:
        try:
            return instantiate(self, cfg, **kwargs)
        except (ValueError, TypeError, NotImplementedError):
            said = complaints(plugins_in(cfg if isinstance(cfg, dict) else cfg.as_dict()))
            if said and self.exit_on_error:
                self.exit(2, f"error: {said}\n")
            raise

    ArgumentParser.error = error  # type: ignore[method-assign]
    ArgumentParser.instantiate_classes = instantiate_classes  # type: ignore


def plugins_in(value: Any) -> Iterator[Spec]:
    """The plugins that a configuration names by ``class_path``."""
    if isinstance(value, Mapping):
        if (cls := _plugin_class(value.get("class_path"))) is not None:
            yield cls, value.get("init_args") or {}
        for each in value.values():
            yield from plugins_in(each)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from plugins_in(each)


def plugins_in_message(message: str) -> Iterator[Spec]:
    """The plugins in the values that a parser's error ``message`` quotes, or whose arguments it calls unknown."""
    for path, name in re.findall(r"class_path '([\w.]+)':\s+\w+ '([\w.]+)' is not (?:accepted|expected)", message):
        yield from plugins_in({"class_path": path, "init_args": {name: None}})
    for text in re.findall(r"Given value: ([{\[].*[}\]])$", message, re.MULTILINE):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):  # it quotes an object
            continue
        yield from plugins_in(value)


def misnamed(message: str) -> str:
    """The class paths in a parser's error ``message`` that this package does not have; empty if there are none."""
    package = sys.modules["lightning_fp8"]
    names = dict.fromkeys(re.findall(r"class_path '?lightning_fp8\.(\w+)'?\b", message))
    classes = [name for name in package.__all__ if isinstance(getattr(package, name), type)]
    nearest = {name: get_close_matches(name, classes, 3) for name in names if not hasattr(package, name)}
    return "\n".join(
        f"there is no lightning_fp8.{name}" + bool(found) * f"; did you mean lightning_fp8.{' or '.join(found)}?"
        for name, found in nearest.items()
    )


def complaints(plugins: Iterable[Spec]) -> str:
    """The errors that these plugins raise for their arguments, one per line; empty if there are none."""
    return "\n".join(dict.fromkeys(filter(None, (_complaint(*plugin) for plugin in plugins))))


def _named(path: Any) -> Any:
    """The object called ``path`` in a module that the parser has imported, or None."""
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    return getattr(sys.modules.get(module or "lightning_fp8"), name, None)


def _plugin_class(path: Any) -> type[FP8FabricPrecision] | None:
    found = _named(path)
    return found if isinstance(found, type) and issubclass(found, FP8FabricPrecision) else None


def _complaint(cls: type[FP8FabricPrecision], arguments: Mapping[str, Any]) -> str:
    parameters = signature(cls).parameters
    if all(parameter.kind is not Parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in arguments:
            if name not in parameters:
                return f"{cls.__name__} has no argument {name!r}; its arguments are {', '.join(parameters)}"
    try:
        cls(**{name: _read(name, value) for name, value in arguments.items()})
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"{cls.__name__}: {error}"
    return ""


def _read(name: str, value: Any) -> Any:
    """``value`` as parsed by the parser."""
    if name == "recipe" and isinstance(value, Mapping):
        fields = {field: _read(field, given) for field, given in value.get("init_args", value).items()}
        return _recipe_class(value["class_path"])(**fields) if "class_path" in value else fields
    if name == "skip" and callable(found := _named(value)):
        return found
    return _TEXT_FOR_FLAGS.get(value.lower(), value) if isinstance(value, str) else value


def _recipe_class(path: Any) -> type[Recipe]:
    for cls in RECIPES.values():
        if path in (cls.__name__, f"lightning_fp8.{cls.__name__}", f"{cls.__module__}.{cls.__name__}"):
            return cls
    known = ", ".join(f"lightning_fp8.{cls.__name__}" for cls in RECIPES.values())
    raise ValueError(f"class_path={path!r} is not a recipe; use one of {known}")
