"""Every matrix that takes part in a product is in the table, and why it is not in FP8 if it is not."""

from __future__ import annotations

import functools
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_fp8
from lightning_fp8 import convert_module
from lightning_fp8.convert.conversion import LayerDecision, plan_conversion
from lightning_fp8.convert.policy import Policy


def decisions(model: nn.Module, **policy: object) -> dict[str, LayerDecision]:
    return {layer.name: layer for layer in plan_conversion(model, Policy(**policy)).layers}


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
    assert found["experts.down_proj"].reason == "3-D parameter of Experts: products of experts do not run in FP8"
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
    (layer,) = plan_conversion(nn.ModuleList([module]), Policy()).layers
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


def test_what_is_looked_up_added_or_scaled_by_is_no_matrix() -> None:
    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 16))
            self.pos_embed = nn.Parameter(torch.zeros(1, 17, 16))
            self.relative_position_bias_table = nn.Parameter(torch.zeros(49, 4))
            self.A_log = nn.Parameter(torch.zeros(64, 8))
            self.layer_scale = nn.Parameter(torch.zeros(16, 1, 1))
            self.codes = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
            self.table = nn.Embedding(40, 16)
            self.norm = nn.LayerNorm((4, 16))
            self.depthwise = nn.Conv2d(16, 16, 7, groups=16)
            self.lazy = nn.LazyConv2d(16, 1)

    assert kinds(Vision()) == {}


def test_names_that_only_sound_like_what_is_added_are_matrices() -> None:
    model = nn.Module()
    names = ("logits_weight", "W_pos_proj", "w_compose", "catalog", "W_query", "query_kernel", "possible", "betatron")
    for name in names:
        model.register_parameter(name, nn.Parameter(torch.randn(16, 16)))
    for name in ("pos_emb", "posEmbed", "token_embedding_weight", "queries", "layernorm", "init_state", "h_mean"):
        model.register_parameter(name, nn.Parameter(torch.randn(16, 16)))
    assert tuple(kinds(model)) == names


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
    assert found.reason == "Attention multiplies by a parameter of its own, not by a linear layer"


def test_a_weight_that_is_computed_is_its_layers() -> None:
    model = nn.ModuleDict({"conv": nn.Conv1d(16, 16, 3), "linear": nn.Linear(16, 16)})
    for module in model.values():
        nn.utils.parametrizations.weight_norm(module)
    assert kinds(model) == {"conv": ("convolution", (16, 16, 3)), "linear": ("linear", (16, 16))}
    assert decisions(model)["linear"].reason == "ParametrizedLinear is a subclass of nn.Linear"


def test_shares_are_of_all_matrices() -> None:
    model = nn.ModuleDict({"experts": Experts(), "blocks": nn.ModuleList(nn.Linear(16, 16) for _ in range(3))})
    summary = plan_conversion(model, Policy())
    assert summary.share_of_parameters == 256 / (4 * 32 * 16 + 4 * 16 * 16 + 3 * 256)
    assert str(summary).endswith("1 of 3 linear layers run in FP8: 6.67 % of the parameters of all matrices")


def test_a_subclass_without_a_forward_of_its_own_is_said_to_be_one() -> None:
    class Renamed(nn.Linear):
        pass

    assert decisions(nn.Sequential(Renamed(16, 16)))["0"].reason == "Renamed is a subclass of nn.Linear"


# Layers that are never called


class ReadsWeight(nn.Module):
    """As timm's attention with a bias of q and v, and Mamba's dt_proj."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.dt, self.proj = (nn.Linear(16, 16) for _ in range(3))
        nn.init.zeros_(self.proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self._scan(F.linear(x, weight=self.qkv.weight, bias=self.qkv.bias))

    def _scan(self, x: Tensor) -> Tensor:
        return self.proj((self.dt.weight @ x.transpose(-1, -2)).transpose(-1, -2).to(self.proj.weight.dtype))


class Undecided(ReadsWeight):
    """What it reads in one branch it calls in another, hands on, or asks for a dtype."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.qkv(x) if x.is_cuda else F.linear(x, self.qkv.weight)
        x = functools.partial(torch.utils.checkpoint.checkpoint, self.dt)(x.to(self.dt.weight.dtype))
        return self.proj.forward(x @ self.proj.weight)


def test_weights_that_are_read_without_a_call_stay_in_bf16() -> None:
    model = nn.ModuleDict({"reads": ReadsWeight(), "undecided": Undecided()})
    found = decisions(model, first_last_layers_bf16=False)
    for name in ("qkv", "dt"):
        assert found[f"reads.{name}"].reason == "ReadsWeight reads its weight and never calls it"
    assert [name for name, layer in found.items() if layer.fp8] == [
        "reads.proj",
        *(f"undecided.{n}" for n in ("qkv", "dt", "proj")),
    ]
    convert_module(model, first_last_layers_bf16=False)
    assert type(model["reads"].qkv) is nn.Linear


def test_classes_without_a_source_leave_it_open() -> None:
    space: dict[str, type] = {}
    exec("class Typed(Base):\n def forward(self, x): return x @ self.qkv.weight", {"Base": ReadsWeight}, space)
    assert decisions(space["Typed"](), first_last_layers_bf16=False)["qkv"].fp8


def test_a_forward_that_was_replaced_on_the_instance_stays() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    model[1].forward = types.MethodType(lambda self, x: nn.Linear.forward(self, x) * 2, model[1])
    found = decisions(model, first_last_layers_bf16=False)
    assert found["1"].reason == "its forward was replaced on the instance, by something that may not call ours"
    assert [name for name, layer in found.items() if layer.fp8] == ["0", "2", "3"]
    convert_module(model, first_last_layers_bf16=False)
    assert type(model[1]) is nn.Linear
