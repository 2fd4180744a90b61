"""What the first training step adds to the table: what ran, why not, and its share of FLOPs."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Callback, FP8FabricPrecision, FP8Precision, Linear, convert_module, fp8_autocast
from lightning_fp8.convert.apply import apply_conversion
from lightning_fp8.convert.first_step import FROZEN, FirstStep
from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.convert.policy import Policy
from lightning_fp8.ops import plans
from lightning_fp8.ops.cast import quantize_op
from tests.convert.first_step.watched import Block, Trained, decision, fit
from tests.small import quiet_trainer


def test_a_table_that_holds_is_confirmed() -> None:
    module, plugin = Trained(), FP8Precision("tensorwise")
    assert not fit(module, plugin, epochs=2)
    assert {layer.ran for layer in plugin.summary.layers if layer.fp8} == {True}
    assert {layer.ran for layer in plugin.summary.layers if not layer.fp8} == {None}
    assert " ran in " in str(plugin.summary).splitlines()[0]
    assert plugin.summary.share_of_flops == pytest.approx(12 / 23, abs=1e-9)  # the first layer's input has no gradient
    assert not plugin.summary.idle
    quiet_trainer(plugins=[plugin], callbacks=[FP8Callback()]).validate(
        module, DataLoader(torch.randn(4, 16)), verbose=False
    )
    assert plugin.summary.share_of_flops is not None  # what is known stays known


def test_what_ran_instead_of_kernels_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here casts go the way of a card, on a device that runs no kernels."""
    monkeypatch.setitem(quantize_op.implementations, "cpu", quantize_op.implementations["cuda"])
    plans.clear_plan_cache()
    module, plugin = Trained(), FP8Precision("tensorwise")
    fit(module, plugin)
    (fallback,) = plugin.summary.fallbacks
    plans.clear_plan_cache()
    assert "kernels are not supported on cpu. Plain torch operations are used instead" in fallback
    assert " ".join(str(plugin.summary).splitlines()).endswith(fallback)
    assert {layer.precision for layer in plugin.summary.layers if layer.fp8} == {"FP8"}


def test_a_weight_that_is_read_is_named_once_with_its_reader() -> None:
    module, plugin = Trained(Block(), Block(reads=True)), FP8Precision("tensorwise")
    (said,) = fit(module, plugin, epochs=2)
    reason = "Block read its weight and did not call it in the first training step"
    assert f": blocks.2.fc: {reason}" in said
    found = decision(plugin.summary, "blocks.2.fc")
    assert (found.fp8, found.ran, found.precision, found.reason) == (True, False, "BF16", reason)
    assert plugin.summary.idle == (found,)
    assert plugin.summary.num_fp8 == 3
    assert plugin.summary.share_of_parameters == 3 / 8
    assert plugin.summary.share_of_flops == pytest.approx(9 / 23, abs=1e-9)
    assert "3 of 8 linear layers ran in FP8" in str(plugin.summary)


def test_layers_that_are_not_called() -> None:
    module, plugin = Trained(), FP8Precision("tensorwise")
    module.used = lambda index: index != 1
    (said,) = fit(module, plugin)
    assert ": blocks.1.fc, blocks.1.out: it was not called in the first 2 training steps, which is harmless" in said


def test_layers_that_another_step_of_the_epoch_calls_are_not_named() -> None:
    class Drops(Trained):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.used = lambda index: index != 1 + batch_idx % 2

    module, plugin = Drops(), FP8Precision("tensorwise")
    assert not fit(module, plugin)
    assert not plugin.summary.idle
    assert decision(plugin.summary, "blocks.1.fc").reason == "first ran after the first training step"


def test_a_step_that_calls_nothing_is_not_the_first() -> None:
    class Skips(Trained):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            return super().training_step(batch, batch_idx) if batch_idx else None

    module, plugin = Skips(), FP8Precision("tensorwise")
    assert not fit(module, plugin)
    assert {layer.ran for layer in plugin.summary.layers if layer.fp8} == {True}
    assert plugin.summary.share_of_flops == pytest.approx(12 / 23, abs=1e-9)


def test_one_step_says_nothing_of_the_others() -> None:
    module, plugin = Trained(), FP8Precision("tensorwise")
    module.used = lambda index: index != 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(plugins=[plugin], callbacks=[FP8Callback()], max_steps=1)
        trainer.fit(module, DataLoader(torch.randn(8, 16), 4))
    assert not [warning for warning in caught if "multiplied nothing" in str(warning.message)]
    assert [layer.name for layer in plugin.summary.idle] == ["blocks.1.fc", "blocks.1.out"]


def test_copies_that_nobody_trains_or_calls_are_not_named() -> None:
    module, plugin = Trained(), FP8Precision("tensorwise")
    module.average = copy.deepcopy(module.blocks).requires_grad_(False)
    assert not fit(module, plugin)
    averages = [layer for layer in plugin.summary.layers if layer.fp8 and "average" in layer.name]
    assert {(layer.ran, layer.reason) for layer in averages} == {(False, FROZEN)}
    assert plugin.summary.num_fp8 == 4
    assert plugin.summary.share_of_flops == pytest.approx(12 / 23, abs=1e-9)


def test_a_second_fit_judges_anew() -> None:
    module, plugin = Trained(), FP8Precision("tensorwise")
    module.used = lambda index: index != 1
    assert len(fit(module, plugin)) == 1
    assert not fit(module, plugin)  # nothing new
    module.used = lambda index: True
    assert not fit(module, plugin)
    assert not plugin.summary.idle
    assert decision(plugin.summary, "blocks.1.fc").reason == ""


def test_layers_that_are_called_later_have_run_in_the_end() -> None:
    class Late(Trained):
        def on_train_epoch_start(self) -> None:
            self.used = lambda index: index != 1 or self.current_epoch > 0

    module, plugin = Late(), FP8Precision("tensorwise")
    (said,) = fit(module, plugin, epochs=2)
    assert ": blocks.1.fc, blocks.1.out: it was not called in the first 2 training steps, which is harmless" in said
    assert not plugin.summary.idle
    assert decision(plugin.summary, "blocks.1.fc").reason == "first ran after the first training step"
    assert plugin.summary.num_fp8 == 4


def test_a_forward_that_was_replaced_after_conversion() -> None:
    module, plugin = Trained(), FP8Precision("tensorwise")
    plugin.convert_module(module)
    layer = module.blocks[1].fc
    layer.forward = lambda x: F.linear(x, layer.weight)
    (said,) = fit(module, plugin)
    assert "blocks.1.fc: its forward was replaced on the instance and does not call ours" in said


def test_a_forward_that_was_replaced_and_calls_ours_ran() -> None:
    module, plugin = Trained(), FP8Precision("tensorwise")
    layer = module.blocks[1].fc = Linear(16, 16)
    ours = layer.forward
    layer.forward = lambda x: ours(x)
    assert not fit(module, plugin)
    assert decision(plugin.summary, "blocks.1.fc").ran


def test_a_forward_outside_the_plugins_is_in_high_precision() -> None:
    class Outside(Trained):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.blocks[2](torch.randn(2, 16))

    module, plugin = Outside(), FP8Precision("tensorwise")
    module.used = lambda index: index != 2
    (said,) = fit(module, plugin)
    assert "blocks.2.fc, blocks.2.out: it was called outside the plugin's forward" in said


def test_layers_in_evaluation_mode_are_judged_by_their_evaluations() -> None:
    module, plugin = Trained(), FP8Precision("tensorwise")
    module.blocks[1].eval()
    assert not fit(module, plugin)
    assert decision(plugin.summary, "blocks.1.fc").ran
    assert plugin.summary.share_of_flops == pytest.approx(12 / 23, abs=1e-9)  # they multiplied all the same


def test_many_layers_are_named_briefly() -> None:
    module, plugin = Trained(*(Block() for _ in range(6))), FP8Precision("tensorwise")
    module.used = lambda index: index in (0, 7)
    (said,) = fit(module, plugin)
    assert "blocks.4.out and 4 more: it was not called" in said
    assert len(plugin.summary.idle) == 12


def test_counting_ends_with_the_step_even_if_it_fails() -> None:
    class Failing(Trained):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.modes = _len_torch_dispatch_stack()
            raise RuntimeError("inside")

    module = Failing()
    with pytest.raises(RuntimeError, match="inside"):
        fit(module, FP8Precision("tensorwise"))
    assert module.modes == 1
    assert not _len_torch_dispatch_stack()


def test_the_second_step_is_not_counted() -> None:
    class Steps(Trained):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.modes = [*getattr(self, "modes", ()), _len_torch_dispatch_stack()]
            return super().training_step(batch, batch_idx)

    module = Steps()
    fit(module, FP8Precision("tensorwise"), epochs=2)
    assert module.modes == [1, 0, 0, 0]


def test_flops_of_compiled_models_are_not_counted() -> None:
    model = convert_module(Trained())
    model.blocks[1].compile(backend="eager")
    with FirstStep(model, plan_conversion(model, Policy())).counted():
        assert not _len_torch_dispatch_stack()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_a_step_compiles_is_compiled_and_counted(backend: str) -> None:
    """A loss, or attention, as Transformers' Flex attention, that is compiled when it is first called."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    class Compiles(Trained):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            y = self(batch)
            return torch.compile(multiplied, backend=counter, fullgraph=True)(y)

    def multiplied(y: Tensor) -> Tensor:
        return (y @ y.T).square().mean()

    module, plugin = Compiles(), FP8Precision("tensorwise")
    assert not fit(module, plugin)
    assert counter.frame_count == 1
    in_fp8 = 12 * 2 * 4 * 256
    assert (plugin.summary.flops_in_fp8, plugin.summary.flops) == (in_fp8, in_fp8 * 23 // 12 + 3 * 2 * 4 * 4 * 16)


class Activated(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.mish(F.silu(x)))


def test_counting_changes_nothing() -> None:
    """The gradient of SiLU, as decomposed by torch's own mode, has other bits."""
    torch.manual_seed(0)
    counted = Trained(*(Activated() for _ in range(3))).bfloat16()
    uncounted = copy.deepcopy(counted)
    batch = torch.randn(64, 16).bfloat16()
    plan = plan_conversion(counted, Policy())
    for module in (counted, uncounted):
        apply_conversion(module, plan)
    watched = FirstStep(counted, plan)
    with fp8_autocast(fp8_recipe="tensorwise"):
        with watched.counted():
            counted.training_step(batch, 0).backward()
        uncounted.training_step(batch, 0).backward()
    assert watched.finish().flops
    for ours, other in zip(counted.parameters(), uncounted.parameters(), strict=True):
        assert torch.equal(ours.grad, other.grad)


def test_fabric() -> None:
    plugin = FP8FabricPrecision("tensorwise")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    module = Trained(Block(), Block(reads=True))
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 1e-3))
    headings: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            fabric.backward(model(torch.randn(4, 16)).square().mean())
            headings.append(str(plugin.summary).splitlines()[0])
            optimizer.step()
    assert [" planned " in heading for heading in headings] == [True, False]  # what ran is known after a step
    assert sum("blocks.2.fc: Block read its weight" in str(warning.message) for warning in caught) == 1
    assert [layer.name for layer in plugin.summary.idle] == ["blocks.2.fc"]


def test_two_models_of_fabric_are_judged_at_steps_of_their_own() -> None:
    plugin = FP8FabricPrecision("delayed")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    first, second = Trained(), Trained(Block(), Block(reads=True))
    one = fabric.setup(first, torch.optim.SGD(first.parameters(), 1e-3))
    two = fabric.setup(second, torch.optim.SGD(second.parameters(), 1e-3))
    said = []
    for _ in range(2):
        for model, optimizer in (one, two):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                fabric.backward(model(torch.randn(4, 16)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            said.append([str(warning.message) for warning in caught if "multiplied nothing" in str(warning.message)])
    assert [len(texts) for texts in said] == [0, 1, 0, 0]
    assert ": blocks.2.fc: Block read its weight" in said[1][0]
    assert [layer.name for layer in plugin.summary.idle] == ["blocks.2.fc"]
