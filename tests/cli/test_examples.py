"""The example's model and data, and what the comparison reports."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, Subset

from examples import train_gpt
from examples.train_gpt import GPT, StdlibBytes, rotate
from lightning_fp8.cli.main import main
from lightning_fp8.monitor.record import Record
from tests.tiers import thorough

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compare_recipes() -> ModuleType:
    """The script, which imports the file beside it."""
    path = ROOT / "examples" / "compare_recipes.py"
    spec = importlib.util.spec_from_file_location("compare_recipes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def test_training_and_validation_share_no_file() -> None:
    data = StdlibBytes(length=32, train_sequences=4, val_sequences=4)
    data.setup("fit")
    train, val = bytes(data.train.text.tolist()), bytes(data.val.text.tolist())
    files = sorted(Path(next(iter(sys.modules["os"].__file__.rsplit("/", 1)))).glob("*.py"))
    for index, file in enumerate(files):
        text = file.read_bytes()
        if len(text) > 200:
            assert (text in val) == (index % 10 == 0)
            assert (text in train) == (index % 10 != 0)


def test_a_seed_draws_the_same_training_data_and_validation_never_changes() -> None:
    first, again, other = (StdlibBytes(length=32, train_sequences=8, seed=seed) for seed in (1, 1, 2))
    for data in (first, again, other):
        data.setup("fit")
    assert torch.equal(first.train[3], again.train[3])
    assert not torch.equal(first.train.starts, other.train.starts)
    assert torch.equal(first.val.starts, other.val.starts)


def test_the_model_is_causal() -> None:
    model = GPT(width=32, depth=2, heads=2)
    tokens = torch.randint(256, (1, 12))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 256
    before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(before[:8], after[:8])
    assert not torch.allclose(before[8:], after[8:])


def test_blocks_of_modules_compute_the_same() -> None:
    plain, fused = (GPT(width=32, depth=2, heads=2, modules=modules) for modules in (False, True))
    state = {name: value for name, value in plain.state_dict().items() if "blocks" not in name}
    for index, block in enumerate(plain.blocks):
        state |= {
            f"blocks.{index}.{name}": value.detach()
            for name, value in {
                "self_attention.layernorm_qkv.layer_norm_weight": block.attention_norm.weight,
                "self_attention.layernorm_qkv.weight": block.attention.qkv.weight,
                "self_attention.proj.weight": block.attention.out.weight,
                "layernorm_mlp.layer_norm_weight": block.mlp_norm.weight,
                "layernorm_mlp.fc1_weight": torch.cat([block.mlp.gate.weight, block.mlp.up.weight]),
                "layernorm_mlp.fc2_weight": block.mlp.down.weight,
            }.items()
        }
    fused.load_state_dict(state)
    for norm in [*plain.modules(), *fused.modules()]:
        if isinstance(norm, torch.nn.RMSNorm):
            norm.eps = 1e-5  # torch's own is the dtype's
    tokens = torch.randint(256, (2, 12))
    torch.testing.assert_close(plain(tokens), fused(tokens), rtol=1e-4, atol=1e-5)


def test_rotary_embedding_depends_on_distance_only() -> None:
    q, k = torch.randn(2, 8, dtype=torch.float64)
    frequency = torch.tensor([1.0, 0.5, 0.25, 0.125], dtype=torch.float64)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        turned = [rotate(x, (p * frequency).cos(), (p * frequency).sin()) for x, p in ((q, at_q), (k, at_k))]
        return turned[0] @ turned[1]

    torch.testing.assert_close(score(3, 1), score(10, 8))
    assert not torch.isclose(score(3, 1), score(3, 2))


def test_the_comparison_reports_means_spread_and_distance(compare_recipes: ModuleType) -> None:
    recipes = ["bf16", "rowwise", "mxfp8"]
    names = [f"{recipe}/{seed}" for recipe in recipes for seed in (0, 1)] + ["bf16/0/order 1", "bf16/1/order 1"]
    runs = {name: {"val_loss": 2.0, "fp8_layers": 5} for name in names}
    runs["mxfp8/1"]["val_loss"], runs["bf16/1/order 1"]["val_loss"] = 2.04, 1.92
    runs["mxfp8/0"]["fp8_attentions"] = 2
    rows = compare_recipes.table(runs, recipes, seeds=2, orders=2).splitlines()
    assert rows[2] == "| bf16 | 2.0000 | 0.0000 | +0.00% | 0.00% | 5 | 0 |"
    assert rows[4] == "| mxfp8 | 2.0200 | 0.0400 | +1.00% | 1.00% | 5 | 2 |"
    assert rows[5] == "| bf16, other data | 1.9600 | 0.0800 | -2.00% | 2.00% | 5 | 0 |"
    follows = compare_recipes.conclusion(runs, recipes, seeds=2, orders=2)
    assert "by 0.00% to 4.00%." in follows
    # The standard error is 1 %, and t is 12.706.
    assert "- mxfp8: -11.71% to +13.71%, worse in 1 of 2 seeds\n\nEvery interval contains 0." in follows
    for seed in (0, 1):
        runs[f"rowwise/{seed}"]["val_loss"] = 2.01 + 0.001 * seed
        runs[f"mxfp8/{seed}"]["val_loss"] = 2.04
    assert "The interval of rowwise, mxfp8 does not contain 0." in compare_recipes.conclusion(runs, recipes, seeds=2)
    assert not compare_recipes.conclusion(runs, recipes, seeds=1)


class Steps(L.Callback):
    """Notes the steps that begin; ``last`` is interrupted."""

    def __init__(self, last: int = -1) -> None:
        self.last = last
        self.begun: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self.begun.append(trainer.global_step)
        if trainer.global_step == self.last:
            raise InterruptedError


def test_an_interrupted_run_of_the_comparison_resumes(
    compare_recipes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_recipes, "STEPS_OF_AN_EPOCH", 2)

    def losses(folder: str, steps: Steps) -> list[float]:
        L.seed_everything(0, verbose=False)
        model = GPT(width=32, depth=3, heads=1)
        data = compare_recipes.Data(length=32, batch_size=4, train_sequences=40, val_sequences=4)
        return compare_recipes.fitted(model, data, "delayed", 6, False, False, [steps], tmp_path / folder)["losses"]

    with pytest.raises(InterruptedError):
        losses("interrupted", Steps(last=3))
    resumed, whole = Steps(), Steps()
    assert losses("interrupted", resumed) == losses("whole", whole)
    assert (resumed.begun, whole.begun) == ([2, 3, 4, 5], [0, 1, 2, 3, 4, 5])


class Blocks(L.LightningModule):
    """Three numbers that two blocks double; the first one's result is off by a tenth where ``in_fp8``."""

    in_fp8 = True

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))
        for block in self.blocks:
            nn.init.eye_(block.weight).mul_(2)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](batch * torch.tensor([1.1, 1.0, 1.0]) if self.in_fp8 else batch)
        return self.blocks[1](x).sum()


@torch.no_grad()
def test_distances_of_blocks_are_relative_and_of_a_validations_first_batch(compare_recipes: ModuleType) -> None:
    model, trainer = Blocks(), L.Trainer(logger=False, enable_checkpointing=False)
    callback = compare_recipes.BlockDistances(model.blocks)
    for batch_idx, batch in enumerate([torch.tensor([[3.0, 0.0, 4.0]]), torch.ones(1, 3)]):
        model.in_fp8 = True
        callback.on_validation_batch_start(trainer, model, batch, batch_idx)
        model.loss(batch)
        model.in_fp8 = False
        callback.on_validation_batch_end(trainer, model, None, batch, batch_idx)
        assert callback.distances == pytest.approx([0.06, 0.06])  # 0.3 of the norm 5


@thorough
def test_the_comparison_leaves_a_table_and_a_plot_and_resumes(
    compare_recipes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ["--seeds", "1", "--steps", "26", "--width", "32", "--depth", "3", "--batch-size", "16", "--attention"]
    tiny += ["--heads", "1", "--recipes", "delayed", "blockwise"]
    command = [str(ROOT / "examples" / "compare_recipes.py"), *tiny, "--out", str(tmp_path / "tiny")]
    subprocess.run([sys.executable, *command], check=True, capture_output=True, timeout=240)
    runs = json.loads((tmp_path / "tiny.json").read_text())["runs"]
    assert all(len(run["losses"]) == 26 for run in runs.values())
    in_fp8 = {name: (run["fp8_layers"], run["fp8_attentions"]) for name, run in runs.items()}
    assert in_fp8.pop("bf16/0") == (0, 0)
    assert set(in_fp8.values()) == {(5, 1)}
    for recipe in ("delayed", "blockwise"):
        first, middle, _ = runs[f"{recipe}/0"]["block_distances"]
        assert (first, 0.001 < middle < 0.2) == (0, True)  # the first block runs in BF16
    assert (tmp_path / "tiny.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(sys, "argv", command)
    compare_recipes.main()
    again = capsys.readouterr().out
    assert "run 1 of" not in again
    assert "| blockwise |" in again
    page = (tmp_path / "tiny.md").read_text()
    assert "| blockwise |" in page
    assert f"Made on the CPU, torch {torch.__version__}" in page


@thorough
def test_llama_trains_over_a_mesh() -> None:
    """Tensor parallelism changes the order of sums and the scales of pieces alone; FSDP2 changes nothing."""
    losses = {}
    for recipe, cut, ranks in (("delayed", 1, 2), ("delayed", 2, 4)):
        options = ["--accelerator", "cpu", "--steps", "4", "--width", "64", "--depth", "3", "--recipe", recipe]
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [sys.executable, *command, "examples/llama_2d.py", "--tensor-parallel", str(cut), *options],
            capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        printed = done.stdout + done.stderr
        assert "multiplied nothing in FP8" not in printed
        (loss,) = re.findall(r"'loss': ([\d.]+)", printed)
        losses[recipe, cut] = float(loss)
    first = losses["delayed", 1]
    assert losses["delayed", 2] == pytest.approx(first, rel=2e-3)
    assert 0 < first < 5.5


def test_a_mesh_in_yaml_names_what_there_is() -> None:
    config = yaml.safe_load((ROOT / "configs" / "model_parallel.yaml").read_text())
    strategy = config["trainer"]["strategy"]
    assert strategy["class_path"] == f"{ModelParallelStrategy.__module__.rpartition('.')[0]}.ModelParallelStrategy"
    ModelParallelStrategy(**strategy["init_args"])
    for part in ("model", "data"):
        module, _, name = config[part]["class_path"].rpartition(".")
        assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("compare", [False, pytest.param(True, marks=thorough)])
def test_a_monitored_run_leaves_records_and_names_the_command_that_shows_them(
    compare: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(StdlibBytes, "val_dataloader", lambda data: DataLoader(Subset(data.val, [0, 1])))
    tiny = ["--steps", "12", "--width", "32", "--depth", "3", "--batch-size", "1", "--monitor", "my runs"]
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *tiny, *["--compare"] * compare])
    train_gpt.main()
    command = capsys.readouterr().out.rstrip().rpartition("lightning-fp8 ")[2]
    _, *records = shlex.split(command)
    assert records == ["my runs/delayed.npz", "my runs/bf16.npz"][: 1 + compare]
    for path in records:
        record = Record.load(path)
        assert [interval.last_step - interval.first_step + 1 for interval in record.intervals] == [10, 2]
        assert bool(record.names) == (path == records[0])  # a run in BF16 has the loss alone
    main(shlex.split(command))
    assert (tmp_path / "my runs" / "delayed.html").stat().st_size > 10_000
