"""Models with a recipe of their own compute, outside every region, what they compute in a region of that recipe."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    conversion_summary,
    convert_module,
    fp8_autocast,
    fp8_state_dict,
    load_fp8_state_dict,
    update_fp8_scales,
)
from lightning_fp8.convert.pinned import Pinned, pinned_in
from lightning_fp8.convert.summary import ATTENTION
from lightning_fp8.numerics.recipes import RECIPES, make_recipe
from lightning_fp8.torchao.float8 import convert_to_float8_training
from tests.convert.fuse.runs import CONFIG, TOKENS, causal_lm
from tests.small import assert_raises, mlp, step_in_backward
from tests.tiers import thorough

transformers = pytest.importorskip("transformers")

RECIPE = DelayedScaling(amax_history_len=3)
STEPS = 8


def gpt() -> Any:
    torch.manual_seed(0)
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=37, n_embd=64, n_layer=4, n_head=4, n_positions=32, **dropout)
    return transformers.GPT2LMHeadModel(config).bfloat16().train()


FAMILIES: dict[str, Callable[[], Any]] = {"gpt": gpt, "llama": lambda: causal_lm(layers=4)}


def rows(step: int) -> Tensor:
    return (TOKENS + step) % CONFIG["vocab_size"]


def loss_of(model: Any, step: int) -> Tensor:
    loss: Tensor = model(input_ids=rows(step), labels=rows(step)).loss
    return loss


def trained(model: Any, region: Callable[[], Any] = nullcontext, steps: int = STEPS, micro_batches: int = 1) -> Any:
    """All losses, gradients and evaluations of so many steps, and the state of the scales after them."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    found: list[Tensor] = []
    for step in range(steps):
        for micro_batch in range(micro_batches):
            with region():
                loss = loss_of(model, micro_batches * step + micro_batch)
            loss.backward()
            found.append(loss.detach())
        found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 1:
            model.eval()
            with torch.no_grad(), region():
                found.append(loss_of(model, step + 1))
            model.train()
    return found, fp8_state_dict(model)


def assert_same(one: Any, other: Any) -> None:
    """Values of :func:`trained`, to the bit."""
    assert all(map(torch.equal, one[0], other[0]))
    assert len(one[0]) == len(other[0])
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]) if isinstance(value, Tensor) else value == other[1][name], name


def in_a_region(recipe: Any, attention: bool = False) -> Callable[[], Any]:
    return lambda: fp8_autocast(fp8_recipe=make_recipe({"name": recipe, "fp8_dpa": attention}))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("attention", [False, True, "always"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_a_region_does(recipe: str, fuse: bool, attention: Any, family: str) -> None:
    make = FAMILIES[family]
    pinned = convert_module(make(), recipe=recipe, fuse=fuse, attention=attention)
    found = trained(pinned)
    expected = trained(convert_module(make(), fuse=fuse), in_a_region(recipe, bool(attention)))
    assert_same(found, expected)
    assert bool((found[1]["scale"] > 0).any()) is (recipe == "delayed")
    calls = [row for row in conversion_summary(pinned).layers if row.kind == ATTENTION]
    assert all(row.ran or not row.fp8 for row in calls)
    assert sum(row.precision == "FP8" for row in calls) == (2 if attention else 0)
    with fp8_autocast(enabled=False), torch.no_grad():
        in_high_precision = loss_of(pinned, 0)
    plain = make()
    plain.load_state_dict(pinned.state_dict())
    with torch.no_grad():
        assert torch.equal(in_high_precision, loss_of(plain, 0))
        assert not torch.equal(in_high_precision, loss_of(pinned, 0))
        with fp8_autocast(fp8_recipe="tensorwise"):
            found_in_region = loss_of(pinned, 0)
        assert convert_module(pinned, fuse=fuse) is pinned
        assert torch.equal(in_high_precision, loss_of(pinned, 0))
        with fp8_autocast(fp8_recipe="tensorwise"):
            assert torch.equal(found_in_region, loss_of(pinned, 0))
    assert not pinned_in(pinned)


def small(recipe: Any = RECIPE, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return convert_module(mlp(depth=5), recipe=recipe, **options)  # type: ignore[return-value]


def steps_of(model: nn.Module, count: int = 4, first: int = 0, region: Callable[[], Any] = nullcontext) -> list[Tensor]:
    """The losses of so many steps, whose inputs grow."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for step in range(first, first + count):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)) * (1 + step)
        with region():
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=thorough)])
def test_copies_keep_the_recipe_and_move_their_scales(how: str, compiled: bool) -> None:
    model = small(skip=lambda module, name: name == "4")  # pickles have no functions
    steps_of(model)
    copied = COPIES[how](model)
    ((root, pinned),) = pinned_in(copied)
    history = copied[2].history
    assert root is copied
    assert pinned.history is history is not model[2].history
    assert pinned.recipe == RECIPE
    assert [row.fp8 for row in pinned.summary(copied).layers] == [False, True, False, True, False]
    load_fp8_state_dict(copied, fp8_state_dict(model))
    before = history.scale.clone()
    train = torch.compile(copied, backend="aot_eager") if compiled else copied
    again = steps_of(train, first=4)
    assert_equal(again, steps_of(model, first=4))
    assert not torch.equal(history.scale, before)
    assert torch.equal(history.scale, model[2].history.scale)
    convert_module(copied, skip=["4"])
    assert pinned_in(model)
    assert not pinned_in(copied)


def test_a_copied_part_runs_by_the_recipe() -> None:
    model = small()
    part = copy.deepcopy(model[2:6])
    assert not pinned_in(part)
    steps = steps_of_part(part)
    assert_equal(steps, steps_of_part(model[2:6]))
    assert part[0].history.updates == model[2].history.updates == 2


def steps_of_part(part: nn.Module) -> list[Tensor]:
    """Losses of two steps of a part that takes 32 features."""
    optimizer = torch.optim.SGD(part.parameters(), 0.05)
    losses = []
    for step in range(2):
        loss = part(torch.ones(8, 32) * (step + 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.model, self.use_reentrant = model, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.model[0](x).requires_grad_()  # type: ignore[index, operator]
        y: Tensor = checkpoint(self.model[1:], x, use_reentrant=self.use_reentrant)  # type: ignore[index]
        return y


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", [RECIPE, Float8BlockScaling()])
def test_checkpointing_recomputes_by_the_recipe(use_reentrant: bool, recipe: Any) -> None:
    model, other = small(recipe), small(recipe)
    assert_equal(steps_of(Checkpointed(model, use_reentrant)), steps_of(other))
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert torch.equal(model[2].history.scale, other[2].history.scale)


def test_a_checkpointed_forward_of_a_region_is_repeated_in_its_recipe() -> None:
    model, plain = small(), small(None)
    region = in_a_region("blockwise")
    assert_equal(steps_of(Checkpointed(model, False), region=region), steps_of(plain, region=region))
    assert_equal(
        steps_of(Checkpointed(model, False), region=lambda: fp8_autocast(enabled=False)), steps_of(plain, first=0)
    )


@pytest.mark.parametrize("recipe", [RECIPE, pytest.param("tensorwise", marks=thorough)])
@pytest.mark.parametrize("where_faster", [False, pytest.param(True, marks=thorough)])
def test_compiled_code_runs_by_the_recipe(recipe: Any, where_faster: bool) -> None:
    model, other = small(recipe, where_faster=where_faster), small(None)
    torch._dynamo.reset()
    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counted, fullgraph=True)
    assert_equal(steps_of(compiled), steps_of(other, region=lambda: fp8_autocast(fp8_recipe=recipe)))
    assert counted.frame_count <= 2  # before and after the first scales, as in a region
    assert torch.equal(model[2].history.scale, other[2].history.scale)
    with torch.no_grad(), fp8_autocast(enabled=False):
        assert torch.equal(compiled(torch.ones(4, 16)), model(torch.ones(4, 16)))


@pytest.mark.parametrize("others", ["tensorwise", None, "torchao"])
def test_compiled_scales_follow_where_a_part_has_another_recipe(others: str | None) -> None:
    """Layers of the part that stay in BF16 have slots beside those of the rest. An eager copy has the same scales."""

    def mixed() -> nn.Sequential:
        model = small(RECIPE)
        if others == "torchao":
            convert_to_float8_training(model[4])
        else:
            convert_module(model[4:], recipe=others)
        return model

    model, eager = mixed(), mixed()
    torch._dynamo.reset()
    steps_of(torch.compile(model, backend="aot_eager"))  # type: ignore[arg-type]
    steps_of(eager)
    scales = [slot.scale.item() for _, slot in model[2].named_slots()]
    assert scales == [slot.scale.item() for _, slot in eager[2].named_slots()]
    assert all(scales)


def test_two_models_have_two_recipes_in_one_step() -> None:
    other = DelayedScaling(margin=2, amax_history_len=2, reduce_amax=False)
    together, alone = [small(RECIPE), small(other), small("rowwise")], [small(RECIPE), small(other), small("rowwise")]
    optimizer = torch.optim.SGD([each for model in together for each in model.parameters()], 0.05)
    found = []
    for step in range(4):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)) * (1 + step)
        losses = [model(x).square().mean() for model in together]
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.detach() for loss in losses])
    for model, same, losses in zip(together, alone, zip(*found)):
        assert_equal(list(losses), steps_of(same))
        assert torch.equal(model[2].history.scale, same[2].history.scale)
    assert not torch.equal(together[0][2].history.scale, together[1][2].history.scale)


def test_frozen_parts_are_updated_with_the_rest() -> None:
    def frozen(recipe: Any) -> nn.Sequential:
        model = small(recipe)
        for parameter in model[:3].parameters():
            parameter.requires_grad_(False)
        return model

    model, other = frozen(RECIPE), frozen(None)
    assert_equal(steps_of(model), steps_of(other, region=lambda: fp8_autocast(fp8_recipe=RECIPE)))
    assert torch.equal(model[2].history.scale, other[2].history.scale)
    assert float(model[2].slots[next(iter(model[2].slots))].scale) > 0


@pytest.mark.parametrize("recipe", [RECIPE, "blockwise"])
def test_micro_batches_share_cached_weights(recipe: Any) -> None:
    model, other = small(recipe, cache_fp8_weights=True), small(recipe)
    optimizers = [torch.optim.SGD(each.parameters(), 0.05) for each in (model, other)]
    casts = []
    for step in range(3):
        for micro_batch in range(2):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(2 * step + micro_batch))
            losses = [each(x).square().mean() for each in (model, other)]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
            kept = model[2]._weight_cache
            assert kept is not None
            assert other[2]._weight_cache is None
            casts.append(id(next(iter(kept.values()))))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(x), other(x))
            model[2].weight.mul_(1.5)  # told by the weight's version
            other[2].weight.mul_(1.5)
            assert torch.equal(model(x), other(x))
        model.train()
    assert casts[::2] == casts[1::2]
    assert torch.equal(model[2].history.scale, other[2].history.scale)
    with fp8_autocast():  # whose context caches nothing
        model(x)
    assert model[2]._weight_cache is None


@pytest.mark.parametrize("recipe", [RECIPE, "blockwise"])
def test_an_optimizer_that_writes_data_renews_cached_weights(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not torch's, in a process that has entered no region of delayed scaling."""
    monkeypatch.setattr("lightning_fp8.delayed.update._region.recipe", None)
    losses = []
    for caches in (True, False):
        model = small(recipe, cache_fp8_weights=caches)
        for step in range(3):
            loss = model(torch.ones(8, 16) * (1 + step)).square().mean()
            loss.backward()
            losses.append(loss.detach())
            for parameter in model.parameters():
                parameter.data.sub_(0.5 * parameter.grad)  # type: ignore[operator]
                parameter.grad = None
            update_fp8_scales(model)
    assert_equal(losses[:3], losses[3:])


def test_the_state_resumes_to_the_bit() -> None:
    model = small()
    steps_of(model)
    state, weights = fp8_state_dict(model), copy.deepcopy(model.state_dict())
    assert [*weights] == [*mlp(depth=5).state_dict()]
    again = small()
    again.load_state_dict(weights)
    assert load_fp8_state_dict(again, state) == []
    assert_equal(steps_of(model, first=4), steps_of(again, first=4))
    assert torch.equal(model[2].history.scale, again[2].history.scale)


def test_weights_of_another_run_are_told() -> None:
    model, other = small(), small()
    steps_of(model)
    steps_of(other, 2)
    model.load_state_dict(other.state_dict())
    with pytest.warns(UserWarning, match="load_state_dict has changed weights"):
        model[2](torch.ones(4, 32))  # an inner module
    model = small()
    compiled = torch.compile(model, backend="eager")
    steps_of(compiled)
    model.load_state_dict(other.state_dict())
    with pytest.warns(UserWarning, match="load_state_dict has changed weights"):
        steps_of(compiled, 1)


def test_steps_inside_a_backward_update_scales() -> None:
    model, other = small(), small(None)
    for each in (model, other):
        step_in_backward(each)
    for step in range(3):
        model(torch.ones(8, 16) * (1 + step)).square().mean().backward()
        with fp8_autocast(fp8_recipe=RECIPE):
            loss = other(torch.ones(8, 16) * (1 + step)).square().mean()
        loss.backward()
    assert model[2].history.updates == other[2].history.updates == 3
    assert torch.equal(model[2].history.scale, other[2].history.scale)


def test_a_region_calibrates_it() -> None:
    model, other = small(), small(None)
    for each in (model, other):
        with torch.no_grad(), fp8_autocast(enabled=False, calibrating=True, fp8_recipe=RECIPE):
            each(torch.ones(8, 16))
    assert model[2].history.updates == 1
    assert torch.equal(model[2].history.scale, other[2].history.scale)
    assert bool(model[2].history.scale.any())


def test_a_loop_without_an_optimizer_of_torch_is_told(recwarn: pytest.WarningsRecorder) -> None:
    model = small()
    model[2].history.watch.patience = 3
    for _ in range(5):
        model(torch.ones(8, 16)).sum().backward()
    (said,) = [str(each.message) for each in recwarn]
    assert said.startswith("the FP8 scales are not updated: 3 training forwards")
    update_fp8_scales(model)
    assert model[2].history.updates == 1


def test_only_a_model_without_a_recipe_needs_a_region() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps_of(small())
    unpinned = convert_module(small())
    with pytest.warns(UserWarning, match="outside every fp8_autocast"):
        steps_of(unpinned)


def test_a_replica_of_data_parallel_is_refused() -> None:
    def replicate() -> Any:
        return small("tensorwise")[2]._replicate_for_data_parallel()

    assert_raises(replicate, RuntimeError, "Linear would run in FP8, tensorwise, there. Use DistributedDataParallel")


def test_arguments_are_checked_before_the_model_changes() -> None:
    model = mlp()
    for options, error, message in (
        ({"attention": True}, ValueError, "attention=True needs a recipe: convert_module"),
        ({"attention": "always"}, ValueError, "attention='always' needs a recipe"),
        ({"cache_fp8_weights": True}, ValueError, "cache_fp8_weights=True needs a recipe"),
        ({"cache_fp8_weights": 1, "recipe": "delayed"}, TypeError, "cache_fp8_weights=1"),
        ({"attention": 1, "recipe": "delayed"}, TypeError, "attention=1 must be True, False or 'always'"),
        ({"recipe": "fast"}, ValueError, "fast"),
        ({"recipe": "delayed", "skip": ["head"]}, ValueError, "head"),
    ):
        assert_raises(lambda options=options: convert_module(model, **options), error, message)  # type: ignore[misc]
        assert type(model[2]) is nn.Linear
        assert not pinned_in(model)
    with pytest.warns(UserWarning, match="attention=True: no module of Sequential was found that computes attention"):
        convert_module(model, recipe="delayed", attention=True)


def test_a_later_call_decides_anew_for_all_layers() -> None:
    model = small("tensorwise", first_last_layers_bf16=False)
    assert model[0].fp8
    convert_module(model, recipe="rowwise")
    ((_, pinned),) = pinned_in(model)
    assert isinstance(pinned, Pinned)
    assert (pinned.recipe.name, model[0].fp8, model[2].own_context.recipe.name) == ("rowwise", False, "rowwise")
    inner = nn.Sequential(model, nn.Linear(4, 4))
    convert_module(model[2:6], recipe="tensorwise", first_last_layers_bf16=False)
    assert [each.own_context.recipe.name for each in (model[2], model[4])] == ["tensorwise"] * 2
    convert_module(inner)
    assert not pinned_in(inner)
    assert model[2].own_context is None


def test_layers_of_torchaos_function_keep_their_recipe_until_they_are_pinned() -> None:
    torch.manual_seed(0)
    model = convert_to_float8_training(mlp(depth=5))
    assert convert_module(model)[0].own_context.recipe.name == "tensorwise"  # type: ignore[index]
    for _ in range(2):
        convert_module(model, recipe="blockwise")
        assert model[2].own_context.recipe.name == "blockwise"  # type: ignore[index]
    convert_module(model)
    assert model[2].own_context is None  # type: ignore[index]
