"""``lightning-fp8``: LightningCLI for any LightningModule, with FP8 recipes typed in YAML, and commands of our own.

``lightning-fp8 fit --config configs/delayed.yaml``; ``validate``, ``test`` and ``predict`` likewise. Nothing heavy is
imported before it is known what is asked for.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning_fp8.version import __version__

COMMANDS = {
    "doctor": "lightning_fp8.doctor",
    "bench": "lightning_fp8.cli.bench",
    "kernels": "lightning_fp8.cli.kernels",
    "checkpoint": "lightning_fp8.cli.checkpoint",
    "plan": "lightning_fp8.cli.plan",
}
"""The module of each command of our own; its ``main`` takes the arguments."""

LIGHTNING = ("fit", "validate", "test", "predict")
"""Commands of LightningCLI."""

HELP = """usage: lightning-fp8 COMMAND ...

  fit, validate, test, predict
                a LightningModule with FP8 recipes, from YAML: lightning-fp8 fit --config my.yaml
  doctor        what runs on this machine, what does not, and what to install
  bench         time the matrix products of a model's layers on this card, and keep the fastest
  kernels       compile a model's kernels where no card is, to be carried to one
  checkpoint    inspect FP8 state in checkpoints, and convert Transformer Engine's
  plan          bytes on the wire, collectives and memory of a model on many cards, BF16 beside FP8

lightning-fp8 COMMAND --help tells more; --version prints the version.
"""


def recipe_hints(message: str) -> str:
    """For each wrong recipe field in a parser's error ``message``, a line that lists the valid ones."""
    from lightning_fp8.recipes import RECIPES

    fields = {cls.__name__: [field.name for field in dataclasses.fields(cls)] for cls in RECIPES.values()}
    wrong = re.findall(r"class_path 'lightning_fp8\.(?:recipes\.)?(\w+)':\s+Option '([^']+)' is not accepted", message)
    lines = [
        f"{cls} has no field {field!r}; its fields are {', '.join(fields[cls])}"
        for cls, field in dict.fromkeys(wrong)
        if cls in fields
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``lightning-fp8`` with ``argv`` (``None``: the command line).

    Models and data modules are named by class path, also from modules of the working directory.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in COMMANDS:
        importlib.import_module(COMMANDS[command]).main(arguments[1:])
    elif command in ("-h", "--help"):
        print(HELP, end="")
    elif command == "--version":
        print(f"lightning-fp8 {__version__}")
    elif command in LIGHTNING or command.startswith("-"):
        _lightning_cli(argv)
    else:
        print(f"{HELP}\nerror: there is no command {command!r}", file=sys.stderr)
        raise SystemExit(2)


def _lightning_cli(argv: Sequence[str] | None) -> None:
    try:
        import jsonargparse
    except ImportError:
        raise SystemExit('lightning-fp8 needs jsonargparse; install it: pip install "lightning-fp8[cli]"') from None
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

    class Parser(LightningArgumentParser):
        def error(self, message: str, *args: Any, **kwargs: Any) -> NoReturn:
            from lightning_fp8.plugin.hints import complaints, plugins_in

            hints = recipe_hints(message) or complaints(plugins_in(message))
            super().error(f"{message}\n\n{hints}" if hints else message, *args, **kwargs)

    class FP8CLI(LightningCLI):
        def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
            parser = Parser(**kwargs)
            parser.add_argument(
                "-c", "--config", action=jsonargparse.ActionConfigFile, help="a YAML configuration file"
            )
            return parser

        def instantiate_classes(self) -> None:
            from lightning_fp8.plugin.hints import complaints

            try:
                super().instantiate_classes()
            except ValueError:
                if said := complaints(self._fp8_plugins()):
                    self.parser.error(said)
                raise

        def _fp8_plugins(self) -> list[dict[str, Any]]:
            plugins = self._get(self.config, "trainer.plugins")
            return [
                plugin.init_args.as_dict()
                for plugin in (plugins if isinstance(plugins, list) else [plugins])
                if getattr(plugin, "class_path", "").endswith(".FP8Precision")
            ]

    # A console script does not see the working directory, where the user's classes live.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    FP8CLI(
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        auto_configure_optimizers=False,
        args=None if argv is None else list(argv),  # Lightning warns of arguments that come twice
    )


if __name__ == "__main__":
    main()
