"""``lightning-fp8 config RECIPE``: prints YAML for a LightningCLI with all arguments of the plugin and the recipe.

lightning-fp8 config delayed > my.yaml
lightning-fp8 fit --config my.yaml --model my_module.MyModel --data my_module.MyData
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from inspect import signature
from typing import Any

import torch

from lightning_fp8.numerics.formats import Format
from lightning_fp8.numerics.recipes import RECIPES


def configuration(name: str) -> str:
    """The YAML of the plugin with its defaults, and the recipe ``name``."""
    from lightning_fp8.plugin.precision import FP8Precision  # imported late: Lightning takes seconds to import

    recipe = RECIPES[name]()
    arguments = {argument: parameter.default for argument, parameter in signature(FP8Precision).parameters.items()}
    arguments["recipe"] = {"name": name} | {f.name: getattr(recipe, f.name) for f in fields(recipe)}
    head = f"""\
# {type(recipe).__name__}: {(type(recipe).__doc__ or "").strip().splitlines()[0]}
# Use: lightning-fp8 fit --config FILE --model my_module.MyModel --data my_module.MyData,
# or with a LightningCLI of your own. These are the defaults.
trainer:
  plugins:
    - class_path: lightning_fp8.FP8Precision
      init_args:
"""
    return head + "".join(f"{line}\n" for line in _lines(arguments, indent=8))


def _lines(values: Mapping[str, Any], indent: int) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield f"{' ' * indent}{name}:"
            yield from _lines(value, indent + 2)
        else:
            text = value.name if isinstance(value, Format) else value
            text = str(text) if isinstance(text, (str, torch.dtype)) else json.dumps(text)
            yield f"{' ' * indent}{name}: {text}"


def main(argv: Sequence[str]) -> None:
    """``lightning-fp8 config``."""
    parser = argparse.ArgumentParser(
        prog="lightning-fp8 config", description="Print YAML for lightning-fp8 fit, or for a LightningCLI of your own."
    )
    parser.add_argument("recipe", choices=list(RECIPES), help="the recipe, with the defaults of all its fields")
    print(configuration(parser.parse_args(argv).recipe), end="")
