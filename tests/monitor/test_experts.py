"""Samples of the casts of experts equal a count of the same tensors in float64, expert by expert."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import convert_module, fp8_autocast, ops, update_fp8_scales
from lightning_fp8.monitor.casts import Casts, Sampler
from lightning_fp8.numerics.recipes import RECIPES, make_recipe
from lightning_fp8.numerics.scaled import Role
from lightning_fp8.ops.sample import COUNTS, EXPONENTS
from tests.monitor.test_sampled_casts import assert_counts, expanded, expected

pytest.importorskip("transformers.integrations.moe")

TOKENS, TOP_K, EXPERTS, HIDDEN, WIDTH = 20, 2, 3, 48, 40


def experts(transposed: bool, number: int = EXPERTS) -> Any:
    """Experts of Mixtral, or of gpt-oss, whose weights are stored transposed and have biases."""
    torch.manual_seed(0)
    if transposed:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

        made: Any = GptOssExperts(GptOssConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=number))
    else:
        from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

        made = MixtralExperts(MixtralConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=number))
    for index, each in enumerate(made.parameters()):
        spread = torch.logspace(-5, 2, len(each)).view(-1, *[1] * (each.dim() - 1))  # experts of unlike magnitudes
        nn.init.normal_(each).data.mul_(spread if index < 2 else 1)
    return convert_module(nn.ModuleList([made.bfloat16()]), first_last_layers_bf16=False)


def seen(model: Any) -> SimpleNamespace:
    """One forward and backward: the tensors that are cast, by the names of their roles."""
    layer, found = model[0], SimpleNamespace()
    x = (torch.randn(TOKENS, HIDDEN) * torch.logspace(-3, 1, HIDDEN)).bfloat16().requires_grad_()
    index = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, TOP_K).bfloat16()
    activation = type(layer)._apply_gate

    def apply_gate(hidden: Tensor) -> Tensor:
        hidden.register_hook(lambda gradient: setattr(found, "hidden_gradient", gradient.clone()))
        found.activated = activation(layer, hidden)
        return found.activated  # type: ignore[no-any-return]

    layer._apply_gate = apply_gate
    y = layer(x, index, weights)
    dy = torch.randn_like(y)
    y.backward(dy)
    del layer._apply_gate
    rows = torch.arange(TOKENS).repeat_interleave(TOP_K)  # in any order: counts do not depend on it
    return SimpleNamespace(
        gate_up_input=x.detach()[rows],
        gate_up_grad_output=found.hidden_gradient,
        down_input=found.activated.detach(),
        down_grad_output=dy[rows] * weights.flatten()[:, None],
    )


def counted(x: Tensor, recipe: Any, role: Role, scale: Tensor) -> dict[str, float]:
    """The counts of the cast of a matrix by the dense op, in float64."""
    cast = recipe.cast(role)
    operand = ops.quantize(x, cast, scale=scale if recipe.name == "delayed" else None).rowwise
    assert operand is not None
    return expected(x, operand.data, expanded(operand.scale_inv, operand.layout, *x.shape), cast.float8)


@pytest.mark.parametrize("transposed", [False, True], ids=["Mixtral", "gpt-oss"])
@pytest.mark.parametrize("name", RECIPES)
def test_samples_of_experts_equal_counts_of_each_matrix(name: str, transposed: bool) -> None:
    recipe, model = make_recipe(name), experts(transposed)
    with fp8_autocast(fp8_recipe=recipe):
        seen(model)
    update_fp8_scales(model)
    casts = Casts.of(model)
    assert casts.names == [f"0.{w}_proj.{role.value}" for w in ("gate_up", "down") for role in recipe_roles()]
    sampler = Sampler(casts.slots)
    sampler.begin(what_if=True)
    scales = [slot.scale.clone() for slot in casts.slots]
    with fp8_autocast(fp8_recipe=recipe):
        tensors = seen(model)
    sampler.end()
    counts, losses, exponents = sampler.read()
    for cast_name, role, scale, found, of_recipes, bins in zip(
        casts.names, casts.roles, scales, counts, losses, exponents
    ):
        weight = cast_name.split(".")[1]
        if role is Role.WEIGHT:
            stored = getattr(model[0], weight).detach()
            parts = list(stored.mT.contiguous() if transposed else stored)
        else:
            parts = [getattr(tensors, f"{weight.removesuffix('_proj')}_{role.value}")]
        if name == "tensorwise" and role is Role.WEIGHT:  # one scale for all experts
            parts = [torch.cat(parts)]
        each = [counted(part, recipe, role, scale) for part in parts]
        wanted = {count: sum(one[count] for one in each) for count in COUNTS}
        if role is Role.WEIGHT:
            wanted["casts"] = EXPERTS
        assert_counts(dict(zip(COUNTS, found.tolist())), wanted)
        assert bins.sum() == wanted["elements"], cast_name
        assert len(bins) == EXPONENTS
        assert (of_recipes[:, 0] == wanted["elements"] - wanted["zeros"]).all(), cast_name


def recipe_roles() -> tuple[Role, ...]:
    return Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT


def test_nothing_is_sampled_a_second_time() -> None:
    """The backward casts the weight's transposed copy again, where the recipe does not share codes."""
    model = experts(False)
    with fp8_autocast(fp8_recipe="blockwise"):
        seen(model)
    casts = Casts.of(model)
    sampler = Sampler(casts.slots)
    sampler.begin(what_if=False)
    for _ in range(2):
        with fp8_autocast(fp8_recipe="blockwise"):
            seen(model)
    sampler.end()
    number = {name: row[COUNTS.index("casts")] for name, row in zip(casts.names, sampler.read()[0])}
    assert number == {name: 2 * EXPERTS if name.endswith("weight") else 2 for name in casts.names}


def test_of_many_experts_some_at_equal_distances_are_sampled() -> None:
    model = experts(False, 20)
    with fp8_autocast(fp8_recipe="rowwise"):
        seen(model)
    casts = Casts.of(model)
    sampler = Sampler(casts.slots)
    sampler.begin(what_if=False)
    with fp8_autocast(fp8_recipe="rowwise"):
        seen(model)
    sampler.end()
    signal = dict(zip(casts.names, sampler.read()[0][:, COUNTS.index("signal")]))
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(model[0], name).detach()
        assert signal[f"0.{name}.weight"] == pytest.approx(weight[::3].double().square().sum().item(), rel=1e-6)
