"""Transformer Engine's attention state in a live DotProductAttention: loaded, trained with, saved, written back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fp8 import (
    DelayedScaling,
    DotProductAttention,
    Linear,
    export_te_state_dict,
    fp8_autocast,
    fp8_state_dict,
    load_fp8_state_dict,
    load_te_state_dict,
)
from lightning_fp8.te.torch_file import read_pickle
from tests.checkpoint.te_models import expected_rows, spec, te_files
from tests.checkpoint.te_writer import VERSIONS
from tests.small import fp8_trainer, update_all_scales

RECIPE = DelayedScaling(amax_history_len=8, fp8_dpa=True)
ROWS = ("qkv", "s", "o", "dqkv", "do", "dp")


class MultiheadAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = Linear(16, 48), Linear(16, 16)
        self.core_attention = DotProductAttention(2, 8, qkv_format="bshd")

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.core_attention(*self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(-3)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attention, self.fc = MultiheadAttention(), Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(self.self_attention(x))


MODULES = [f"0.{name}" for name in ("self_attention.qkv", "self_attention.proj", "fc", "self_attention.core_attention")]
ATTENTION = MODULES[-1]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Specification and state dict of every version."""
    specs = [spec(version, nn.Sequential(Block()).state_dict(), MODULES) for version in VERSIONS]
    return dict(zip(VERSIONS, zip(specs, te_files(specs, tmp_path_factory.mktemp("te")))))


def rows_of(model: nn.Module) -> dict[str, tuple[float, Tensor]]:
    state = fp8_state_dict(model)
    return {
        name: (state["scale"][index].item(), state["amax_history"][:, index])
        for index, name in enumerate(state["names"])
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("own", [False, True], ids=["load_te_state_dict", "load_state_dict"])
def test_rows_of_every_version_go_on_in_training(version: str, own: bool, files: Any) -> None:
    written, state_dict = files[version]
    model = nn.Sequential(Block())
    model.load_state_dict(state_dict, strict=True) if own else load_te_state_dict(model, state_dict)
    expected, before = expected_rows(written["states"], attention=version != "1.5"), rows_of(model)
    for role in ROWS:
        scale, window = expected[f"{ATTENTION}.{role}"]
        assert before[f"{ATTENTION}.{role}"][0] == scale
        assert torch.equal(before[f"{ATTENTION}.{role}"][1], window)
    with fp8_autocast(fp8_recipe=RECIPE):
        y = model(torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(0)))
    y.square().sum().backward()
    attention = model[0].self_attention.core_attention
    amax = {role.value: slot.amax.item() for role, slot in attention.slots.items()}
    assert attention.record.fp8 == 1
    update_all_scales(RECIPE)
    after = rows_of(model)
    for role in ROWS:
        (old_scale, old), (scale, window) = before[f"{ATTENTION}.{role}"], after[f"{ATTENTION}.{role}"]
        if role in ("s", "dp"):
            assert scale == old_scale
            assert torch.equal(window, old)
            continue
        assert amax[role] > 0
        largest = max(amax[role], old[1:].max().item())
        assert scale == pytest.approx((57344.0 if role.startswith("d") else 448.0) / largest, rel=1e-6)
        assert torch.equal(window, torch.tensor([0.0, *old[2:], amax[role]]))


@pytest.mark.parametrize("version", ["1.7", "1.13", "2.4.0"])
def test_what_is_exported_loads_again(version: str, files: Any) -> None:
    model, other = nn.Sequential(Block()), nn.Sequential(Block())
    load_te_state_dict(model, files["1.12"][1])
    exported = export_te_state_dict(model, version, RECIPE)
    middle = "fused_attention." if version == "1.7" else ""
    assert f"{ATTENTION}.{middle}_extra_state" in exported
    load_te_state_dict(other, exported)
    for name, (scale, window) in rows_of(model).items():
        assert rows_of(other)[name][0] == scale
        assert torch.equal(rows_of(other)[name][1], window)


def test_the_exported_recipe_says_whether_attention_ran_in_fp8() -> None:
    for recipe in (RECIPE, DelayedScaling(amax_history_len=8), DelayedScaling(amax_history_len=8, fp8_mha=True)):
        model = nn.Sequential(Block())
        with fp8_autocast(fp8_recipe=recipe):
            model(torch.randn(2, 20, 16)).sum().backward()
        update_all_scales(recipe)
        exported = export_te_state_dict(model, "2.4.0", recipe)
        fields = read_pickle(bytes(exported[f"{ATTENTION}._extra_state"].tolist()))["recipe"].state
        assert (fields["fp8_dpa"], fields["fp8_mha"]) == (recipe.fp8_dpa, recipe.fp8_mha)


def test_a_state_that_is_no_attentions_is_refused(files: Any) -> None:
    state_dict = files["2.18"][1]
    wrong = {**state_dict, f"{ATTENTION}._extra_state": state_dict["0.fc._extra_state"]}
    model = nn.Sequential(Block())
    with pytest.raises(RuntimeError, match=rf"{ATTENTION}\._extra_state: .*no column for"):
        model.load_state_dict(wrong)


def test_our_own_state_carries_the_rows(files: Any) -> None:
    model, other = nn.Sequential(Block()), nn.Sequential(Block())
    load_te_state_dict(model, files["1.12"][1])
    assert load_fp8_state_dict(other, fp8_state_dict(model)) == []
    for name, (scale, window) in rows_of(model).items():
        assert rows_of(other)[name][0] == scale
        assert torch.equal(rows_of(other)[name][1], window)


class Trained(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Block() for _ in range(3)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.model(batch) - batch.flip(-1)).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


def test_the_trainer_resumes_to_the_bit(tmp_path: Path) -> None:
    data = torch.randn(24, 20, 16, generator=torch.Generator().manual_seed(0))

    def fitted(epochs: int, path: Path | None = None) -> tuple[Trained, Any]:
        L.seed_everything(1)
        module, trainer = Trained(), fp8_trainer(RECIPE, max_epochs=epochs, limit_val_batches=0)
        trainer.fit(module, DataLoader(data, batch_size=8), ckpt_path=path)  # type: ignore[arg-type]
        return module, trainer

    _, trainer = fitted(1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed, _ = fitted(2, tmp_path / "one.ckpt")
    straight, trainer = fitted(2)
    history = trainer.precision_plugin.histories["model"]
    scales = dict(zip(history.names, history.scale.tolist()))
    assert all(scales[f"model.1.self_attention.core_attention.{role}"] > 0 for role in ROWS if role not in ("s", "dp"))
    assert straight.model[1].self_attention.core_attention.record.fp8 == 6
    assert all(torch.equal(*pair) for pair in zip(resumed.parameters(), straight.parameters()))
    for name, (scale, window) in rows_of(straight).items():
        assert rows_of(resumed)[name][0] == scale
        assert torch.equal(rows_of(resumed)[name][1], window)
