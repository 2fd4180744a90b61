"""Experts in FP8 against each expert alone, to the bit, and against whole-tensor casts and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fp8 import fp8_autocast
from lightning_fp8.functions.grouped import MANY_EXPERTS
from lightning_fp8.numerics.recipes import RECIPES, DelayedScaling, Float8CurrentScaling, make_recipe
from lightning_fp8.numerics.scaled import Layout, Role, ScaledTensor
from tests.modules.expert_cases import (
    EXPERTS,
    HIDDEN,
    KINDS,
    ROUTINGS,
    WholeTensorCasts,
    by_hand,
    experts,
    given,
    loop_of_linears,
    run,
)
from tests.small import update_all_scales

KIND = pytest.mark.parametrize("kind", KINDS)
ROUTING = pytest.mark.parametrize("routing", ROUTINGS)
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
WHOLE, BLOCKS = ("delayed", "tensorwise"), ("rowwise", "blockwise", "mxfp8")


def module_for(kind: str, routing: str, dtype: torch.dtype) -> Any:
    module = experts(kind, dtype)
    module._is_expert_parallel = routing == "other ranks"
    return module


def assert_equal(made: dict[str, Tensor], expected: dict[str, Tensor], skip: str = "_bias") -> None:
    """To the bit, NaN included; not the sum of a bias's gradient, which depends on the order."""
    assert made.keys() == expected.keys()
    for name, value in made.items():
        if not name.endswith(skip):
            torch.testing.assert_close(
                value, expected[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )


def assert_near(made: dict[str, Tensor], expected: dict[str, Tensor], near: float) -> None:
    """By the norm of the difference, relatively."""
    for name, value in made.items():
        other = expected[name].double()
        assert value.isnan().equal(other.isnan()), name
        error, norm = (float(each.nan_to_num(0).norm()) for each in (value.double() - other, other))
        assert error <= near * norm, (name, error, norm)


@pytest.mark.parametrize("recipe", BLOCKS)
@DTYPE
@ROUTING
@KIND
def test_experts_equal_a_loop_of_linears(kind: str, routing: str, dtype: torch.dtype, recipe: str) -> None:
    module, inputs = module_for(kind, routing, dtype), given(routing, dtype)
    made, expected = run(module, *inputs, recipe), by_hand(module, *inputs, loop_of_linears(recipe))
    assert_equal(made, expected)
    assert_near(made, expected, 1e-5 if dtype is torch.float32 else 0.02)
    assert made["y"].isnan().any(1).sum() == (routing == "NaN")


@pytest.mark.parametrize("recipe", WHOLE)
@DTYPE
@ROUTING
@KIND
def test_experts_equal_casts_of_the_whole_tensors(kind: str, routing: str, dtype: torch.dtype, recipe: str) -> None:
    """And float64, where an FP8 rounding that falls the other way is seen once in a while."""
    module, inputs = module_for(kind, routing, dtype), given(routing, dtype)
    made = run(module, *inputs, recipe)
    hand = WholeTensorCasts(make_recipe(recipe), exact=False)
    assert_equal(made, by_hand(module, *inputs, hand))
    exact = by_hand(module, *inputs, WholeTensorCasts(make_recipe(recipe), exact=True))
    assert_near(made, exact, 2e-3 if dtype is torch.float32 else 0.02)
    assert made["y"].isnan().any() == (routing == "NaN")
    if recipe == "delayed":
        for gemm, slots in enumerate(module.ensure_slots()):
            for role, slot in slots.items():
                torch.testing.assert_close(
                    slot.amax, torch.tensor(hand.amaxes[gemm, role]), rtol=0, atol=0, equal_nan=True
                )


@KIND
def test_delayed_scales(kind: str) -> None:
    """A step's scales come from the amaxes of all experts in the steps before, one for each role of each GEMM.

    A step without tokens keeps those of tokens.
    """
    module, recipe = experts(kind), DelayedScaling(amax_history_len=2, amax_compute_algo="max")
    seen: dict[tuple[int, Role], list[float]] = {}
    for step, routing in enumerate(("ragged", "one expert", "no token", "skewed", "one row")):
        inputs = given(routing, torch.float32)
        scales = {
            (gemm, role): slot.scale.clone()
            for gemm, slots in enumerate(module.ensure_slots())
            for role, slot in slots.items()
        }
        for of, scale in scales.items():
            largest = max(seen.get(of, [0.0])[-2:])
            top = 57344.0 if of[1] is Role.GRAD_OUTPUT else 448.0
            assert float(scale) == pytest.approx(top / largest if largest else 0.0, rel=1e-6), (step, of)
        hand = WholeTensorCasts(recipe, exact=False, scales=scales)
        made = run(module, *inputs, recipe)
        assert_equal(made, by_hand(module, *inputs, hand))
        for of, amax in hand.amaxes.items():
            if amax:
                seen.setdefault(of, []).append(amax)
        update_all_scales(recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_wgrad_of_many_experts_is_in_high_precision(kind: str, recipe: str) -> None:
    """y and dx as of few experts; dw is that of the values which the GEMMs multiply, before their casts."""
    count = MANY_EXPERTS + 1
    module = experts(kind, count=count)
    h, _, w, dy = given("ragged", torch.float32)
    index = torch.randint(0, count, w.shape, generator=torch.Generator().manual_seed(0))
    made = run(module, h, index, w, dy, recipe)
    hand = loop_of_linears(recipe) if recipe in BLOCKS else WholeTensorCasts(make_recipe(recipe), exact=False)
    expected = by_hand(module, h, index, w, dy, hand)
    weights = "gate_up_proj", "down_proj"
    assert_equal(*({name: of[name] for name in ("y", "dx", "d routing")} for of in (made, expected)))
    for name in weights:
        assert not torch.equal(made[name], expected[name])

    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def noted(gemm: int, rows: Tensor, weight: Tensor, groups: list[slice]) -> Tensor:
        y = hand(gemm, rows, weight, groups)
        y.register_hook(lambda dy: seen.__setitem__(gemm, (dy.double(), rows.detach().double())))
        noted.groups = groups  # type: ignore[attr-defined]
        return y

    by_hand(module, h, index, w, dy, noted)
    for gemm, name in enumerate(weights):
        dy_of, x = seen[gemm]
        dw = torch.stack([dy_of[each].t() @ x[each] for each in noted.groups])  # type: ignore[attr-defined]
        torch.testing.assert_close(made[name].double(), dw.mT if module.is_transposed else dw, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [EXPERTS, MANY_EXPERTS + 1])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("trained", ["hidden_states", "routing", "gate_up_proj", "down_proj", "gate_up_proj_bias"])
def test_gradients_of_what_is_trained(trained: str, recipe: str, count: int) -> None:
    """The others are frozen; the gradient is the one among all."""
    module = experts("gpt_oss", count=count)
    h, index, w, dy = given("ragged", torch.float32)
    key = {"hidden_states": "dx", "routing": "d routing"}.get(trained, trained)
    expected = run(module, h, index, w, dy, recipe)[key]
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name == trained)
    module.zero_grad()
    h.requires_grad_(trained == "hidden_states")
    w.requires_grad_(trained == "routing")
    with fp8_autocast(fp8_recipe=recipe):
        module(h, index, w).backward(dy)
    own = {"dx": h, "d routing": w}.get(key)
    gradient = getattr(module, trained).grad if own is None else own.grad
    assert torch.equal(gradient, expected)
    assert sum(each.grad is not None for each in (h, w, *module.parameters())) == 1


@KIND
def test_arguments_by_name(kind: str) -> None:
    """Of which each family has its own, in any order."""
    module, (h, index, w, _) = experts(kind), given("ragged", torch.float32)
    by_index, by_weight = (
        ("router_indices", "routing_weights") if kind == "gpt_oss" else ("top_k_index", "top_k_weights")
    )
    with fp8_autocast(fp8_recipe="tensorwise"):
        expected = module(h, index, w)
        assert torch.equal(module(h, index, **{by_weight: w}), expected)
        assert torch.equal(module(h, **{by_weight: w, by_index: index}), expected)
        assert torch.equal(module(hidden_states=h, **{by_weight: w, by_index: index}), expected)


@DTYPE
@KIND
def test_outside_a_region_the_former_forward_runs(kind: str, dtype: torch.dtype) -> None:
    plain, module, inputs = experts(kind, dtype, converted=False), experts(kind, dtype), given("ragged", dtype)
    with fp8_autocast(enabled=False):
        expected = run(plain, *inputs, "tensorwise", enabled=False)
    assert_equal(run(module, *inputs, "tensorwise", enabled=False), expected)
    module.fp8 = False
    assert_equal(run(module, *inputs, "tensorwise"), expected)
    assert module.record.fp8 == 0


@KIND
def test_loss_of_precision_is_that_of_fp8(kind: str) -> None:
    """Against the former forward: no product is left out, and no weight exchanged."""
    plain, module, inputs = experts(kind, converted=False), experts(kind), given("ragged", torch.float32)
    expected = run(plain, *inputs, "tensorwise", enabled=False)
    for recipe in RECIPES:
        assert_near(run(module, *inputs, recipe), expected, 0.15)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_under_torch_autocast(kind: str, recipe: str) -> None:
    """Weights of float32, whose gradients they are, and tokens of float32; GEMMs give BF16."""
    module, (h, index, w, dy) = experts(kind), given("ragged", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        made = run(module, h, index, w, dy.bfloat16(), recipe)
    assert made["y"].dtype is torch.float32  # as transformers gives the dtype of its tokens
    assert made["dx"].dtype is made["gate_up_proj"].dtype is torch.float32
    expected = run(module, h, index, w, dy, recipe)
    assert_near(made, expected, 0.1)
    many = experts(kind, count=MANY_EXPERTS + 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert_near(run(many, h, index, w, dy.bfloat16(), recipe), run(many, h, index, w, dy, recipe), 0.1)


def test_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Amaxes of all roles are observed, and the results are those of high precision."""
    module, plain = experts("gpt_oss"), experts("gpt_oss", converted=False)
    module._is_expert_parallel = True
    inputs = given("ragged", torch.float32)
    made = run(module, *inputs, "delayed", enabled=False, calibrating=True)
    assert_near(made, run(plain, *inputs, "delayed", enabled=False), 1e-5)
    hand = WholeTensorCasts(make_recipe("delayed"), exact=True)
    monkeypatch.setattr(hand, "cast", lambda x, gemm, role: observed(hand.amaxes, x, gemm, role))
    by_hand(module, *inputs, hand)
    for gemm, slots in enumerate(module.ensure_slots()):
        for role, slot in slots.items():
            amax = float(slot.amax) if role is Role.GRAD_OUTPUT else 448 / float(slot.scale)  # at the region's end
            assert amax == pytest.approx(hand.amaxes[gemm, role], rel=1e-4), (gemm, role)


def observed(amaxes: dict[tuple[int, Role], float], x: Tensor, gemm: int, role: Role) -> ScaledTensor:
    """A cast that only observes."""
    amaxes[gemm, role] = float(x.abs().max())
    return ScaledTensor(x.detach().flatten(0, -2), torch.ones(()), Layout.TENSOR)


def test_what_does_not_fit_is_refused() -> None:
    module, (h, index, w, _) = experts("mixtral"), given("ragged", torch.float32)
    with fp8_autocast(fp8_recipe="tensorwise"):
        with pytest.raises(ValueError, match=f"experts has in_features={HIDDEN}, but the input has shape"):
            module(h[:, :-1], index, w)
        with pytest.raises(TypeError, match="experts's weight is torch.float32 and the input torch.bfloat16"):
            module(h.bfloat16(), index, w)
    kept = pytest.raises(NotImplementedError, match="is not supported by experts; leave it out, or skip them")
    with fp8_autocast(fp8_recipe=Float8CurrentScaling(backward_override="high_precision")), kept:
        module(h, index, w)
    with fp8_autocast(fp8_recipe="tensorwise"):
        y = module(h.requires_grad_(), index, w)
    with pytest.raises(RuntimeError, match="create_graph=True cannot derive experts's gradients"):
        torch.autograd.grad(y.sum(), h, create_graph=True)
