"""``lightning-fp8 sensitivity``: measures which layers to keep in BF16, on a model and its data.

    lightning-fp8 sensitivity --config my.yaml --ckpt_path last.ckpt --batches 4 --recipe tensorwise
    lightning-fp8 sensitivity --config my.yaml --budget 1 --out sensitivity.json --plot sensitivity.png

The YAML is that of ``lightning-fp8 fit``. Its model and data are prepared as by ``fit``. All layers that can run in FP8
are measured, also those that the plugin of the YAML keeps in BF16. Use trained weights, from a checkpoint or loaded by
the model.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning_fp8.cli.values import count


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the ranking. It exits with a message if an argument or a file is invalid."""
    parser = argparse.ArgumentParser(prog="lightning-fp8 sensitivity", description="Find layers to keep in BF16.")
    parser.add_argument("--config", type=Path, required=True, help="YAML of lightning-fp8 fit with model and data")
    parser.add_argument("--ckpt_path", type=Path, help="a checkpoint, whose weights are loaded")
    parser.add_argument("--batches", type=count, default=4, help="number of batches of the training data; default: 4")
    parser.add_argument("--recipe", help="default: the recipe of the YAML's FP8Precision, or delayed")
    parser.add_argument(
        "--group", choices=("layer", "block"), default="layer", help="what is measured at a time; default: layer"
    )
    parser.add_argument("--budget", type=_percent, metavar="PERCENT", help="choose layers for this gradient error")
    parser.add_argument("--seed", type=int, default=0, help="seed of dropout and of the order of data; default: 0")
    parser.add_argument("-o", "--out", type=Path, help="write the result as JSON")
    parser.add_argument("--plot", type=Path, help="plot the ranking to this file")
    args = parser.parse_args(argv)
    if not args.config.is_file():
        raise SystemExit(f"{args.config} does not exist; lightning-fp8 config delayed prints YAML to start from")
    for path in (args.out, args.plot):
        if path is not None and not path.resolve().parent.is_dir():
            raise SystemExit(f"the folder of {path} does not exist")
        if path is not None and path.is_dir():
            raise SystemExit(f"{path} is a folder; name a file in it")
    if args.plot is not None and find_spec("matplotlib") is None:
        raise SystemExit("--plot needs matplotlib; install it: pip install matplotlib")
    model, batches, recipe_of_yaml = _prepared(args.config, args.batches, args.seed)
    if args.ckpt_path is not None:
        _load_weights(model, args.ckpt_path)

    from lightning_fp8.sensitivity import measure_sensitivity

    recipe = args.recipe or recipe_of_yaml or "delayed"
    budget = None if args.budget is None else args.budget / 100
    try:
        found = measure_sensitivity(model, batches, recipe=recipe, group=args.group, budget=budget, seed=args.seed)
    except (TypeError, ValueError) as error:
        raise SystemExit(f"lightning-fp8 sensitivity: {error}") from None
    except RuntimeError as error:
        if "not attached to a `Trainer`" not in str(error):
            raise
        raise SystemExit(
            f"lightning-fp8 sensitivity: {error} training_step must not use self.trainer here, or call "
            "lightning_fp8.sensitivity.measure_sensitivity(model, batches, loss) with a loss function"
        ) from None
    print(found)
    try:
        if args.out is not None:
            found.save(args.out)
        if args.plot is not None:
            found.plot(args.plot)
    except (OSError, ValueError) as error:  # for example a file format that matplotlib does not have
        raise SystemExit(f"lightning-fp8 sensitivity: {error}") from None


def _percent(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} must be a positive number, in percent: 1 for 1 %")


def _prepared(config: Path, number: int, seed: int) -> tuple[Any, list[Any], Any]:
    """The model of a YAML file, batches of its training data, and the recipe of its plugin, if any.

    A Trainer prepares model and data as ``fit`` does, on a GPU if there is one, and stops before the first step.
    """
    import lightning as L
    from lightning.pytorch.utilities import CombinedLoader
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from lightning_fp8 import FP8Precision
    from lightning_fp8.cli.main import lightning_cli

    class Collected(Exception):
        """Ends the fit."""

    class Collect(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            loader = CombinedLoader(trainer.train_dataloader, "max_size_cycle")
            for batch, _, _ in itertools.islice(loader, number):
                batch = pl_module._on_before_batch_transfer(batch)
                batches.append(trainer.strategy.batch_to_device(batch, pl_module.device))
            raise Collected

    L.seed_everything(seed, verbose=False)
    with patch.object(sys, "argv", sys.argv[:1]):  # Lightning warns about missing arguments
        cli = lightning_cli(["--config", str(config)], run=False)
    model, batches = cli.model, list[Any]()
    if not model.automatic_optimization:
        raise SystemExit(
            "lightning-fp8 sensitivity: manual optimization is not supported; call "
            "lightning_fp8.sensitivity.measure_sensitivity(model, batches, loss) with a loss function"
        )
    if cli.datamodule is None and not is_overridden("train_dataloader", model):
        raise SystemExit(
            f"lightning-fp8 sensitivity: {config} has no data:, and {type(model).__name__} has no train_dataloader"
        )
    plugin = cli.trainer.precision_plugin
    trainer = L.Trainer(
        max_steps=1, devices=1, callbacks=[Collect()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0,
    )  # fmt: skip
    try:
        trainer.fit(model, datamodule=cli.datamodule)
    except Collected:
        pass
    except MisconfigurationException as error:
        raise SystemExit(f"lightning-fp8 sensitivity: {error}") from None
    model.to(trainer.strategy.root_device)  # the end of a fit moves it to the CPU
    return model, batches, plugin.recipe if isinstance(plugin, FP8Precision) else None


def _load_weights(model: Any, path: Path) -> None:
    """Load a checkpoint's weights; no pickle is executed."""
    import torch

    if not path.is_file():
        raise SystemExit(f"{path} does not exist")
    try:
        file = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(file.get("state_dict", file))
    except Exception as error:
        raise SystemExit(f"{path} has no weights that load into this model: {error}") from None
