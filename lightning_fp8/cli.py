"""``lightning-fp8``: LightningCLI for any LightningModule, with FP8 recipes typed in YAML.

``lightning-fp8 fit --config configs/delayed.yaml``; ``validate``, ``test`` and ``predict`` likewise.
``lightning-fp8 checkpoint`` inspects and converts checkpoints, ``lightning-fp8 bench`` times matrix products.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning_fp8.checkpoint import cli as checkpoint_cli
from lightning_fp8.recipes import RECIPES


def recipe_hints(message: str) -> str:
    """For each wrong recipe field in a parser's error ``message``, a line that lists the valid ones."""
    fields = {cls.__name__: [field.name for field in dataclasses.fields(cls)] for cls in RECIPES.values()}
    wrong = re.findall(r"class_path 'lightning_fp8\.(?:recipes\.)?(\w+)':\s+Option '([^']+)' is not accepted", message)
    lines = [
        f"{cls} has no field {field!r}; its fields are {', '.join(fields[cls])}"
        for cls, field in dict.fromkeys(wrong)
        if cls in fields
    ]
    return "\n".join(lines)


def main(args: Sequence[str] | None = None) -> None:
    """Run ``lightning-fp8`` with ``args`` (``None``: the command line).

    Models and data modules are named by class path, also from modules of the working directory.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    if arguments[:1] == ["checkpoint"]:
        checkpoint_cli.main(arguments[1:])
        return
    if arguments[:1] == ["bench"]:
        from lightning_fp8 import bench

        bench.main(arguments[1:])
        return
    try:
        import jsonargparse
    except ImportError:
        raise SystemExit('lightning-fp8 needs jsonargparse; install it: pip install "lightning-fp8[cli]"') from None
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

    class Parser(LightningArgumentParser):
        def error(self, message: str, *args: Any, **kwargs: Any) -> NoReturn:
            hints = recipe_hints(message)
            super().error(f"{message}\n\n{hints}" if hints else message, *args, **kwargs)

    class FP8CLI(LightningCLI):
        def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
            parser = Parser(**kwargs)
            parser.add_argument(
                "-c", "--config", action=jsonargparse.ActionConfigFile, help="a YAML configuration file"
            )
            return parser

    # A console script does not see the working directory, where the user's classes live.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    FP8CLI(
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        auto_configure_optimizers=False,
        args=arguments,
    )


if __name__ == "__main__":
    main()
