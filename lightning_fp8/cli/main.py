"""``lightning-fp8``: LightningCLI for any LightningModule with FP8 recipes in YAML, and other commands.

``lightning-fp8 fit --config configs/delayed.yaml``, and likewise ``validate``, ``test`` and ``predict``. Slow imports
are deferred until the command is known.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from cuda_kernels.host.toolchain import install
from lightning_fp8.version import __version__

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.cli import LightningCLI

COMMANDS = {
    "doctor": "lightning_fp8.doctor.report",
    "bench": "lightning_fp8.cli.bench",
    "kernels": "lightning_fp8.cli.kernels",
    "checkpoint": "lightning_fp8.cli.checkpoint",
    "report": "lightning_fp8.cli.report",
    "sensitivity": "lightning_fp8.cli.sensitivity",
    "config": "lightning_fp8.cli.config",
}
"""The module of each command, whose ``main`` takes the arguments."""

NO_PLUGIN = (
    "the Trainer has no FP8Precision. Unless the model converts its layers itself, none is trained in FP8: pass "
    "--config with a file of `lightning-fp8 config RECIPE`, or add --trainer.plugins+=lightning_fp8.FP8Precision"
)
LIGHTNING = ("fit", "validate", "test", "predict")
"""Commands of LightningCLI."""

ABOUT_TYPES = re.compile(
    r"Does not validate against|Subtypes:|Errors:|Not a valid subclass of|Subclass types expect|"
    r"a class path \(str\)|a dict with|Expected a path but|Import path .* does not correspond to a subclass|"
    r"Expected a <class '[\w.]+'>$|Given value"
)
"""Lines of jsonargparse's errors that list the types of an argument, all of which it has tried."""

_HINTS = {
    r"required: \w+\.model": "name your classes: --model my_module.MyModel --data my_module.MyData",
    r'"trainer\.precision"': "FP8 is a plugin: leave precision out, --trainer.plugins+=lightning_fp8.FP8Precision",
    r"class_path 'lightning_fp8\.": "lightning-fp8 config delayed prints the plugin with all its arguments",
    r"No module named": "classes are imported from the working directory and from installed packages",
    "Problems parsing config": "the line is in the file of --config; lightning-fp8 config delayed prints valid YAML",
    r'"config": File does not exist': "lightning-fp8 config delayed > my.yaml writes one to start from",
}
"""What to do about errors of the parser, by patterns."""

HELP = """usage: lightning-fp8 COMMAND ...

  fit, validate, test, predict
                a LightningModule with FP8 recipes, from YAML: lightning-fp8 fit --config my.yaml
  config        print YAML for a recipe, to start from: lightning-fp8 config delayed > my.yaml
  doctor        check this machine: what runs, what does not, and what to install
  bench         time the GEMMs of a model's layers on this GPU, and save the fastest kernels
  kernels       compile a model's kernels on a machine without a GPU
  checkpoint    inspect FP8 state in checkpoints, and convert Transformer Engine's
  report        write an HTML page on a run with FP8Monitor
  sensitivity   measure which layers to keep in BF16, on a model and its data

lightning-fp8 COMMAND --help prints all options; --version prints the version.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``lightning-fp8`` with ``argv`` (``None``: the command line).

    Models and data modules are given by class path, which may be in the working directory.
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
        lightning_cli(argv)
    else:
        print(f"{HELP}\nerror: there is no command {command!r}", file=sys.stderr)
        raise SystemExit(2)


def lightning_cli(argv: Sequence[str] | None, run: bool = True) -> LightningCLI:
    """Run LightningCLI with any model and data. ``run=False`` only creates the model, data and Trainer.

    Raises:
        SystemExit: If jsonargparse is not installed, or an argument is invalid.
    """
    if importlib.util.find_spec("jsonargparse") is None:
        raise SystemExit(f"lightning-fp8 needs jsonargparse: {install('cli')}")
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

    from lightning_fp8 import FP8Precision

    class SaveConfigBesideLogs(SaveConfigCallback):
        """Do not save without a logger: in the working directory, config.yaml may be a file of the user."""

        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            if trainer.loggers:
                super().setup(trainer, pl_module, stage)

    class Parser(LightningArgumentParser):
        def error(self, message: str, *args: Any, **kwargs: Any) -> NoReturn:
            if self.exit_on_error:
                self.exit(2, f"error: {_about_values(message)}\n")
            super().error(message, *args, **kwargs)

    class CLI(LightningCLI):
        def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
            parser = super().init_parser(**kwargs)
            parser.__class__ = Parser
            return parser

        def instantiate_classes(self) -> None:
            try:
                super().instantiate_classes()
            except (ValueError, TypeError) as error:
                self.parser.error(str(error))

        def before_fit(self) -> None:
            if not isinstance(self.trainer.precision_plugin, FP8Precision):
                warnings.warn(NO_PLUGIN, UserWarning, stacklevel=2)

    # sys.path of a console script does not include the working directory, which may have the user's classes.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return CLI(
        run=run,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=SaveConfigBesideLogs,
        save_config_kwargs={"overwrite": True},
        auto_configure_optimizers=False,
        args=None if argv is None else list(argv),  # Lightning warns of arguments that come twice
    )


def _about_values(message: str) -> str:
    """The lines of a parser's error ``message`` that say what is wrong with a value, or all of it if there are none."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    kept = [line for line in lines if line and not ABOUT_TYPES.match(line)]
    kept += [hint for pattern, hint in _HINTS.items() if re.search(pattern, message)]
    return "\n  ".join(dict.fromkeys(kept)) if kept else message


if __name__ == "__main__":
    main()
