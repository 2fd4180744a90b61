"""How long calls of unchanged models are reached: failed runs, plugins, threads, models that go, wrappers of others."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fp8 import FP8FabricPrecision, convert_module, fp8_autocast
from tests.attention.models.test_attention_models import (
    LENGTH,
    TORCH_SDPA,
    WIDTH,
    Attention,
    Block,
    Model,
    Regression,
    trained,
)

ROOT = Path(__file__).parents[3]


@pytest.mark.usefixtures("no_other_models")
def test_evaluation_runs_in_fp8_and_a_failed_run_restores() -> None:
    class Failing(Regression):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            y = self.model(batch)
            assert not torch.equal(y, plain(batch.bfloat16()))
            raise ArithmeticError

        val_dataloader = Regression.train_dataloader

    torch.manual_seed(0)
    module = Failing(Model())
    plain = copy.deepcopy(module.model).bfloat16()
    with pytest.raises(ArithmeticError):
        trained(module, skip=("*.qkv", "*.out"))
    assert F.scaled_dot_product_attention is TORCH_SDPA
    assert {type(m) for m in module.model.modules()} == {
        Model,
        nn.ModuleList,
        Block,
        nn.LayerNorm,
        Attention,
        nn.Linear,
    }


@pytest.mark.usefixtures("no_other_models")
def test_two_plugins_and_threads() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, LENGTH, WIDTH).bfloat16()
    one, other = (Model().bfloat16() for _ in range(2))
    exact = [copy.deepcopy(model)(x) for model in (one, other)]
    skip = ("*.qkv", "*.out")
    first = FP8FabricPrecision("tensorwise", attention=True, skip=skip)
    second = FP8FabricPrecision("tensorwise", attention=True, skip=(*skip, "*.attention"))
    first.convert_module(one)
    second.convert_module(other)
    with first.forward_context():
        found = one(x)
        outside: list[Tensor] = []
        thread = threading.Thread(target=lambda: outside.append(one(x)))
        thread.start()
        thread.join()
    with second.forward_context():
        assert torch.equal(other(x), exact[1])
    assert not torch.equal(found, exact[0])
    assert torch.equal(outside[0], exact[0])
    first.detach_attention()
    assert F.scaled_dot_product_attention is not TORCH_SDPA
    second.detach_attention()
    assert F.scaled_dot_product_attention is TORCH_SDPA


def test_attention_that_was_removed_after_the_conversion_is_passed_over() -> None:
    model = Model()
    model.extra = Attention()
    convert_module(model, first_last_layers_bf16=False)
    del model.extra
    with fp8_autocast(fp8_recipe={"name": "tensorwise", "fp8_dpa": True}):
        result = model(torch.randn(2, LENGTH, WIDTH))
    assert result.isfinite().all()


@pytest.mark.usefixtures("no_other_models")
def test_the_wrapper_goes_with_the_last_model() -> None:
    model = convert_module(Model().bfloat16())
    assert F.scaled_dot_product_attention is TORCH_SDPA
    with fp8_autocast(fp8_recipe={"name": "tensorwise", "fp8_dpa": True}):
        model(torch.randn(2, LENGTH, WIDTH).bfloat16())
    assert F.scaled_dot_product_attention is not TORCH_SDPA
    del model
    gc.collect()
    assert F.scaled_dot_product_attention is TORCH_SDPA


@pytest.mark.usefixtures("no_other_models")
def test_somebody_elses_wrapper_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before ours it is what ours stands in front of; around ours it calls ours, which is not put around it again."""

    def wrapping(function: Any) -> Any:
        return lambda *args, **options: function(*args, **options)

    before = wrapping(TORCH_SDPA)
    monkeypatch.setattr(F, "scaled_dot_product_attention", before)
    x = torch.randn(2, LENGTH, WIDTH).bfloat16()
    plugins: list[FP8FabricPrecision] = []
    models = [Model().bfloat16() for _ in range(2)]
    exact = [copy.deepcopy(model)(x) for model in models]
    for model in models:
        plugins.append(FP8FabricPrecision("tensorwise", attention=True, skip=("*.qkv", "*.out")))
        plugins[-1].convert_module(model)
        ours = F.scaled_dot_product_attention
        assert ours is not before
        monkeypatch.setattr(F, "scaled_dot_product_attention", wrapping(ours))
    for plugin, model, right in zip(plugins, models, exact):
        assert torch.equal(model(x), right)
        with plugin.forward_context():
            assert not torch.equal(model(x), right)
        plugin.detach_attention()
        assert torch.equal(model(x), right)
    monkeypatch.undo()
    assert F.scaled_dot_product_attention is TORCH_SDPA
    trained(Regression(Model()))
    assert F.scaled_dot_product_attention is TORCH_SDPA


@pytest.mark.usefixtures("no_other_models")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_outlives_its_model(copied: Callable[[nn.Module], nn.Module]) -> None:
    def run(model: nn.Module, fp8_dpa: bool = True) -> Tensor:
        with fp8_autocast(fp8_recipe={"name": "tensorwise", "fp8_dpa": fp8_dpa}):
            y: Tensor = model(x)
        return y

    torch.manual_seed(0)
    x = torch.randn(2, LENGTH, WIDTH).bfloat16()
    model = convert_module(Model().bfloat16())
    in_fp8, in_bf16 = run(model), run(model, False)
    other = copied(model)
    del model
    gc.collect()
    assert F.scaled_dot_product_attention is TORCH_SDPA
    assert torch.equal(run(other, False), in_bf16)
    assert torch.equal(run(other), in_fp8)
    assert not torch.equal(in_fp8, in_bf16)
    del other
    gc.collect()
    assert F.scaled_dot_product_attention is TORCH_SDPA


def test_a_pickle_in_a_process_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, LENGTH, WIDTH).bfloat16()
    model = convert_module(Model().bfloat16())
    with fp8_autocast(fp8_recipe={"name": "tensorwise", "fp8_dpa": True}):
        right = model(x)
    torch.save((model, x, right), tmp_path / "model.pt")
    program = (
        "import sys, torch; model, x, right = torch.load(sys.argv[1], weights_only=False)\n"
        "from lightning_fp8 import fp8_autocast\n"
        "with fp8_autocast(fp8_recipe={'name': 'tensorwise', 'fp8_dpa': True}): y = model(x)\n"
        "assert torch.equal(y, right)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "model.pt")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
