"""``lightning-fp8 sensitivity``: measures which layers to keep in BF16, on a model and its data.

    lightning-fp8 sensitivity --config my.yaml --ckpt_path last.ckpt --batches 4 --recipe tensorwise
    lightning-fp8 sensitivity --config my.yaml --budget 1 --out sensitivity.json --plot sensitivity.png

The YAML is that of ``lightning-fp8 fit``. Use trained weights, from a checkpoint or loaded by the model.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the ranking.

    Raises:
        SystemExit: If an argument or a file is invalid.
    """
    parser = argparse.ArgumentParser(prog="lightning-fp8 sensitivity", description=str(__doc__).splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="YAML of lightning-fp8 fit with model and data")
    parser.add_argument("--ckpt_path", type=Path, help="a checkpoint, whose weights are loaded")
    parser.add_argument(
        "--batches", type=_positive, default=4, help="number of batches of the training data; default: 4"
    )
    parser.add_argument("--recipe", default="delayed", help="default: delayed")
    parser.add_argument(
        "--group", choices=("layer", "block"), default="layer", help="measure layers one by one, or in groups"
    )
    parser.add_argument("--budget", type=float, metavar="PERCENT", help="choose layers for this error of the gradient")
    parser.add_argument("--seed", type=int, default=0, help="seed of dropout and of the order of data; default: 0")
    parser.add_argument("-o", "--out", type=Path, help="write the result as JSON")
    parser.add_argument("--plot", type=Path, help="plot the ranking to this file")
    args = parser.parse_args(argv)
    if not args.config.is_file():
        raise SystemExit(f"{args.config} does not exist; lightning-fp8 config delayed prints YAML to start from")
    model, batches = _model_and_batches(args.config, args.batches, args.seed)
    if args.ckpt_path is not None:
        _load_weights(model, args.ckpt_path)

    from lightning_fp8.sensitivity import measure_sensitivity

    budget = None if args.budget is None else args.budget / 100
    try:
        found = measure_sensitivity(model, batches, recipe=args.recipe, group=args.group, budget=budget, seed=args.seed)
    except (TypeError, ValueError) as error:
        raise SystemExit(f"lightning-fp8 sensitivity: {error}") from None
    print(found)
    if args.out is not None:
        found.save(args.out)
    if args.plot is not None:
        found.plot(args.plot)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def _model_and_batches(config: Path, number: int, seed: int) -> tuple[Any, list[Any]]:
    """The model of a YAML file and batches of its training data, on a GPU if there is one."""
    import lightning as L
    import torch
    from lightning.fabric.utilities import move_data_to_device

    from lightning_fp8.cli.main import lightning_cli

    L.seed_everything(seed, verbose=False)
    with patch.object(sys, "argv", sys.argv[:1]):  # Lightning warns about missing arguments
        cli = lightning_cli(["--config", str(config)], run=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = cli.model.to(device)
    model.configure_model()
    data = cli.datamodule
    if data is None:
        loader = model.train_dataloader()
    else:
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
    return model, [move_data_to_device(batch, device) for batch in itertools.islice(loader, number)]


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
