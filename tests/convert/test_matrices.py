"""Every matrix that takes part in a product is in the table, and why it is not in FP8 if it is not."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_fp8
from lightning_fp8 import convert_module
from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.convert.policy import Policy
from lightning_fp8.convert.summary import LayerDecision


def decisions(model: nn.Module, **policy: object) -> dict[str, LayerDecision]:
    return {layer.name: layer for layer in plan_conversion(model, Policy(**policy)).summary.layers}


def kinds(model: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (layer.kind, layer.shape) for name, layer in decisions(model).items()}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 32, 16))
        self.down_proj = nn.Parameter(torch.randn(4, 16, 16))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def test_experts_and_routers() -> None:
    model = nn.ModuleDict({"router": Router(), "experts": Experts()})
    assert kinds(model) == {
        "router.weight": ("parameter", (4, 16)),
        "experts.gate_up_proj": ("experts", (4, 32, 16)),
        "experts.down_proj": ("experts", (4, 16, 16)),
    }
    found = decisions(model)
    assert found["experts.down_proj"].reason == (
        "a parameter of Experts, experts with a forward of their own; FP8 runs transformers' "
        "@use_experts_implementation, and experts with an nn.Linear for each matrix"
    )
    assert found["experts.down_proj"].parameters == 4 * 16 * 16
    assert not any(layer.fp8 for layer in found.values())


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Conv2d(16, 32, 1), "a convolution of 1 × 1 does not run in FP8; the same as an nn.Linear would"),
        (nn.Conv1d(16, 32, 1), "a convolution of 1 does not run in FP8; the same as an nn.Linear would"),
        (nn.Conv2d(3, 32, 8, stride=8), "a convolution of 8 × 8 does not run in FP8"),
        (nn.Conv2d(16, 32, 1, groups=4), "a convolution of 1 × 1 does not run in FP8"),
        (nn.ConvTranspose2d(16, 32, 2), "a convolution of 2 × 2 does not run in FP8"),
    ],
)
def test_convolutions(module: nn.Module, expected: str) -> None:
    (layer,) = plan_conversion(nn.ModuleList([module]), Policy()).summary.layers
    assert (layer.name, layer.kind, layer.shape, layer.reason) == (
        "0",
        "convolution",
        tuple(module.weight.shape),
        expected,
    )


def test_attention_and_recurrence() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2), "lstm": nn.LSTM(16, 8)})
    assert kinds(model) == {
        "attention.in_proj_weight": ("attention", (48, 16)),
        "attention.out_proj": ("linear", (16, 16)),
        "lstm.weight_ih_l0": ("recurrent", (32, 16)),
        "lstm.weight_hh_l0": ("recurrent", (32, 8)),
    }
    other_sizes = nn.MultiheadAttention(16, 2, kdim=8, vdim=8)
    assert set(kinds(other_sizes)) == {f"{x}_proj_weight" for x in "qkv"} | {"out_proj"}


def test_what_is_looked_up_or_scaled_by_or_has_another_shape_is_no_matrix() -> None:
    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 16))
            self.layer_scale = nn.Parameter(torch.zeros(16, 1, 1))
            self.codes = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
            self.table = nn.Embedding(40, 16)
            self.norm = nn.LayerNorm((4, 16))
            self.depthwise = nn.Conv2d(16, 16, 7, groups=16)
            self.lazy = nn.LazyConv2d(16, 1)

    assert kinds(Vision()) == {}


def test_a_name_is_no_evidence() -> None:
    """Whether the forward multiplies by a parameter, its name does not tell."""
    names = ("logits_weight", "W_pos_proj", "w_compose", "catalog", "query_kernel", "possible", "pos_emb", "h_mean")
    model = nn.Module()
    for name in names:
        model.register_parameter(name, nn.Parameter(torch.randn(16, 16)))
    assert tuple(kinds(model)) == names
    assert {layer.reason for layer in decisions(model).values()} == {"a parameter of Module, in no linear layer"}


def test_parameters_that_a_linear_layer_holds_beside_its_weight() -> None:
    class Adapted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.down, self.up = nn.Parameter(torch.zeros(4, 16)), nn.Parameter(torch.zeros(16, 4))

    model = nn.ModuleDict({"adapted": Adapted(), "split": lightning_fp8.Linear(16, 32, parameters_split=("a", "b"))})
    assert list(kinds(model)) == ["adapted", "adapted.down", "adapted.up", "split"]


def test_parameters_of_three_dimensions_that_are_no_experts() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Parameter(torch.randn(16, 4, 8))

    found = decisions(Attention())["q"]
    assert (found.kind, found.parameters) == ("parameter", 512)
    assert found.reason == "a parameter of Attention, in no linear layer"


def test_a_weight_that_is_computed_is_its_layers() -> None:
    model = nn.ModuleDict({"conv": nn.Conv1d(16, 16, 3), "linear": nn.Linear(16, 16)})
    for module in model.values():
        nn.utils.parametrizations.weight_norm(module)
    assert kinds(model) == {"conv": ("convolution", (16, 16, 3)), "linear": ("linear", (16, 16))}
    assert decisions(model)["linear"].reason == "ParametrizedLinear is a subclass of nn.Linear"


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    "hook",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda module: nn.utils.prune.l1_unstructured(module, "weight", 4),
    ],
    ids=["weight_norm", "spectral_norm", "pruned"],
)
def test_a_weight_that_a_hook_computes_is_its_layers(hook: Any) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)), nn.Conv1d(16, 16, 3))
    for module in (model[1], model[4]):
        hook(module)
    assert list(kinds(model)) == ["0", "1", "2", "3", "4"]
    assert plan_conversion(model[:4], Policy()).summary.share_of_parameters == 0.5


def test_a_parameter_beside_the_weight_that_a_hook_computes_is_in_the_table() -> None:
    linear = nn.Linear(16, 16)
    linear.other = nn.Parameter(torch.randn(16, 16))
    linear.weight_v = nn.Parameter(torch.randn(16, 16))  # a name is no evidence
    nn.utils.spectral_norm(linear, "other")
    assert list(kinds(nn.ModuleList([linear]))) == ["0", "0.weight_v", "0.other_orig"]


def test_shares_are_of_all_matrices() -> None:
    model = nn.ModuleDict({"experts": Experts(), "blocks": nn.ModuleList(nn.Linear(16, 16) for _ in range(3))})
    summary = plan_conversion(model, Policy()).summary
    assert summary.share_of_parameters == 256 / (4 * 32 * 16 + 4 * 16 * 16 + 3 * 256)
    said = "1 of 3 linear layers and 0 of 2 weights of experts planned in FP8: 6.67 % of the parameters of all matrices"
    assert summary.verdict() == said


def test_a_subclass_without_a_forward_of_its_own_is_said_to_be_one() -> None:
    class Renamed(nn.Linear):
        pass

    assert decisions(nn.Sequential(Renamed(16, 16)))["0"].reason == "Renamed is a subclass of nn.Linear"


# Layers that do not call our forward


def test_of_torchs_attention_it_is_known_that_it_reads_a_weight() -> None:
    model = nn.ModuleList(nn.MultiheadAttention(16, 2) for _ in range(3))
    found = decisions(model)["1.out_proj"]
    assert (found.fp8, found.reason) == (False, "nn.MultiheadAttention reads its weight and never calls it")
    model.append(nn.Linear(16, 16))
    convert_module(model, first_last_layers_bf16=False)
    assert not isinstance(model[1].out_proj, lightning_fp8.Linear)


def in_a_closure(module: nn.Module) -> None:
    """As transformers' tensor parallelism does."""
    original = module.forward

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return original(x) * 2

    module.forward = doubled


def in_an_attribute(module: nn.Module) -> None:
    """As accelerate's hooks do."""
    module._old_forward = module.forward
    module.forward = functools.partial(lambda module, x: module._old_forward(x) * 2, module)


@pytest.mark.parametrize("put", [in_a_closure, in_an_attribute])
def test_a_forward_on_the_instance_that_calls_the_classes_calls_ours(put: Callable[[nn.Module], None]) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    put(model[1])
    assert decisions(model, first_last_layers_bf16=False)["1"].fp8
    convert_module(model, first_last_layers_bf16=False)
    x = torch.randn(32, 16)
    with lightning_fp8.fp8_autocast(fp8_recipe="tensorwise"):
        y = model[1](x)
        expected = lightning_fp8.Linear.forward(model[1], x) * 2
    assert model[1].record.fp8 == 2
    assert torch.equal(y, expected)
    assert not torch.equal(y, nn.Linear.forward(model[1], x) * 2)


def test_a_forward_that_was_replaced_on_the_instance_stays() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    model[1].forward = types.MethodType(lambda self, x: nn.Linear.forward(self, x) * 2, model[1])
    found = decisions(model, first_last_layers_bf16=False)
    assert found["1"].reason == "its forward was replaced on the instance, by something that may not call ours"
    assert [name for name, layer in found.items() if layer.fp8] == ["0", "2", "3"]
    convert_module(model, first_last_layers_bf16=False)
    assert type(model[1]) is nn.Linear
