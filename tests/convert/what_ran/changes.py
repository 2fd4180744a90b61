"""What users do to layers of a model, each as they write it."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from lightning_fp8 import fp8_autocast

WIDTH, ROWS = 64, 24
"""The width of the residual stream, and the rows of a batch, which no layer has as a size."""


class Block(nn.Module):
    def __init__(self, hidden: int, bias: bool) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, hidden, bias), nn.GELU(), nn.Linear(hidden, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.act(self.fc1(x)))


@dataclass
class Site:
    """One layer of one block of a model in a loop; it keeps no module alive but the model.

    Attributes:
        path: the layer's name in its block.
        number: which change this is; sizes of adapters are made of it.
        outside: modules that the loop calls before each step, outside the region.
        later: what the loop calls after the first step.
        plain: layers that must compute what others, made without the package, compute.
    """

    net: nn.Module
    block_ref: ref[nn.Module]
    path: str
    number: int
    recipe: str
    outside: list[ref[nn.Module]] = field(default_factory=list)
    later: list[Callable[[], None]] = field(default_factory=list)
    plain: list[tuple[ref[nn.Module], nn.Module]] = field(default_factory=list)

    @property
    def blocks(self) -> Any:
        return self.net.model.layers if hasattr(self.net, "model") else self.net.blocks

    @property
    def block(self) -> Any:
        return self.block_ref()

    @property
    def parent(self) -> nn.Module:
        return self.block.get_submodule(self.path.rpartition(".")[0])

    @property
    def layer(self) -> Any:
        return self.block.get_submodule(self.path)

    @layer.setter
    def layer(self, layer: nn.Module) -> None:
        setattr(self.parent, self.path.rpartition(".")[2], layer)

    @property
    def other(self) -> Any:
        """A block beside this one that is not the last."""
        blocks = [each for each in self.blocks[1:-1] if each is not self.block]
        return blocks[self.number % len(blocks)]


def _like(layer: nn.Linear) -> nn.Linear:
    return nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, dtype=layer.weight.dtype)


# --- Structure --------------------------------------------------------------------------------------------------------


class Calls(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Reads(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight, self.inner.bias)


class LoRA(nn.Module):
    def __init__(self, base_layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        dtype = base_layer.weight.dtype
        self.lora_A = nn.Linear(base_layer.in_features, rank, False, dtype=dtype)
        self.lora_B = nn.Linear(rank, base_layer.out_features, False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def replaced(site: Site) -> None:
    site.layer = _like(site.layer)


def replaced_by_a_copy(site: Site) -> None:
    fresh = _like(site.layer)
    fresh.load_state_dict(site.layer.state_dict())
    site.layer = fresh


def block_replaced(site: Site) -> None:
    layers = [(name, each) for name, each in site.parent.named_children() if isinstance(each, nn.Linear)]
    for name, layer in layers:
        setattr(site.parent, name, _like(layer))


def appended(site: Site) -> None:
    last = site.blocks[-1]
    dtype = next(last.parameters()).dtype
    if hasattr(site.net, "model"):
        site.blocks.append(type(last)(site.net.config, len(site.blocks)).to(dtype))
        site.net.config.num_hidden_layers += 1
    elif isinstance(last, Block):
        site.blocks.append(Block(97 + site.number, last.fc1.bias is not None).to(dtype))
    else:
        site.blocks.append(nn.Sequential(nn.Linear(last[0].out_features, 97 + site.number, dtype=dtype), nn.GELU()))


def popped(site: Site) -> None:
    del site.blocks[[*site.blocks].index(site.block)]
    if hasattr(site.net, "model"):
        site.net.config.num_hidden_layers -= 1


def wrapped(site: Site) -> None:
    site.layer = Calls(site.layer)


def with_lora(site: Site) -> None:
    site.layer = LoRA(site.layer, 3 + site.number)


def read_only(site: Site) -> None:
    site.layer = Reads(site.layer)


def shared(site: Site) -> None:
    names = ("fc1", "fc2") if isinstance(site.block, Block) else (site.path,)
    for name in names:
        parent, _, attribute = name.rpartition(".")
        setattr(site.other.get_submodule(parent), attribute, site.block.get_submodule(name))


def tied(site: Site) -> None:
    if isinstance(site.block, Block):
        site.other.fc1, site.other.fc2 = _like(site.block.fc1), _like(site.block.fc2)
    site.other.get_submodule(site.path).weight = site.layer.weight


# --- Calls ------------------------------------------------------------------------------------------------------------


def forward_calls_ours(site: Site) -> None:
    ours = site.layer.forward
    site.layer.forward = lambda x: ours(x)


def forward_replaced(site: Site) -> None:
    layer = ref(site.layer)
    site.layer.forward = lambda x: F.linear(x, layer().weight, layer().bias)


def _under(site: Site, **region: Any) -> None:
    forward = site.parent.forward

    def inside(*args: Any, **kwargs: Any) -> Any:
        with fp8_autocast(**region):
            return forward(*args, **kwargs)

    site.parent.forward = inside


def fp8_disabled(site: Site) -> None:
    _under(site, enabled=False)


def other_recipe(site: Site) -> None:
    _under(site, fp8_recipe="rowwise" if site.recipe == "tensorwise" else "tensorwise")


def called_outside_too(site: Site) -> None:
    site.outside.append(ref(site.layer))


def skipped(site: Site) -> None:
    if isinstance(site.block, Block):
        site.block.forward = lambda x: x
    else:
        site.parent.forward = lambda x: torch.zeros_like(x)


def called_outside(site: Site) -> None:
    skipped(site)
    called_outside_too(site)


def called_later(site: Site) -> None:
    skipped(site)
    holder = ref(site.block if isinstance(site.block, Block) else site.parent)
    site.later.append(lambda: vars(holder()).pop("forward") and None)


# --- Weights ----------------------------------------------------------------------------------------------------------


class Int8Weight(Tensor):
    """A quantized weight of somebody's own: it dequantizes in every op."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Int8Weight:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __repr__(self, **_: Any) -> str:
        return f"Int8Weight({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            (weight,) = args
            return cls(weight.codes.clone(), weight.scale.to(kwargs.get("dtype") or weight.dtype))
        plain = [each.codes * each.scale if isinstance(each, cls) else each for each in args]
        return func(*plain, **kwargs)


def frozen_weight(site: Site) -> None:
    site.layer.weight.requires_grad_(False)


def frozen(site: Site) -> None:
    site.layer.requires_grad_(False)


def new_weight(site: Site) -> None:
    site.layer.weight = nn.Parameter(torch.randn_like(site.layer.weight) / 8)


def weight_subclass(site: Site) -> None:
    weight = site.layer.weight.detach()
    scale = weight.abs().amax(1, keepdim=True) / 127
    quantized = Int8Weight((weight / scale).round().to(torch.int8), scale)
    plain = _like(site.layer)
    plain.load_state_dict({**site.layer.state_dict(), "weight": quantized.codes * scale})
    site.layer.weight = nn.Parameter(quantized, requires_grad=False)
    site.plain.append((ref(site.layer), plain))


def _of_torchao(site: Site, config: str) -> None:
    quantization = importlib.import_module("torchao.quantization")
    plain = Calls(_like(site.layer))
    plain.inner.load_state_dict(site.layer.state_dict())
    quantization.quantize_(plain, getattr(quantization, config)())
    layer = site.layer
    quantization.quantize_(site.parent, getattr(quantization, config)(), lambda module, name: module is layer)
    site.plain.append((ref(site.layer), plain.inner))


def int8_weight_only(site: Site) -> None:
    _of_torchao(site, "Int8WeightOnlyConfig")


def float8_weight_only(site: Site) -> None:
    _of_torchao(site, "Float8WeightOnlyConfig")


def _of_bitsandbytes(site: Site, name: str, **options: Any) -> None:
    old = site.layer
    layer = getattr(importlib.import_module("bitsandbytes.nn"), name)(
        old.in_features, old.out_features, old.bias is not None, **options
    )
    layer.load_state_dict({key: value.clone() for key, value in old.state_dict().items()})
    site.layer = layer.to("cpu")
    site.plain.append((ref(layer), copy.deepcopy(layer)))


def linear_8bit(site: Site) -> None:
    _of_bitsandbytes(site, "Linear8bitLt", has_fp16_weights=False)


def linear_4bit(site: Site) -> None:
    _of_bitsandbytes(site, "Linear4bit", compute_dtype=torch.bfloat16)


def fp8_linear(site: Site) -> None:
    finegrained = importlib.import_module("transformers.integrations.finegrained_fp8")
    layer = finegrained.FP8Linear(site.layer.in_features, site.layer.out_features, (32, 32), has_bias=False)
    with torch.no_grad():
        layer.weight.copy_((100 * torch.randn(layer.weight.shape)).to(layer.weight.dtype))
        layer.weight_scale_inv.fill_(1e-3)
    site.layer = layer


def float8_codes(site: Site) -> None:
    codes = (100 * site.layer.weight.detach()).to(torch.float8_e4m3fn)
    site.layer.weight = nn.Parameter(codes, requires_grad=False)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized(site: Site) -> None:
    parametrize.register_parametrization(site.layer, "weight", Doubled())


def weight_normed(site: Site) -> None:
    parametrizations.weight_norm(site.layer)


def in_float64(site: Site) -> None:
    site.layer.to(torch.float64)


BY_NAME: dict[str, Callable[[Site], None]] = {
    each.__name__: each
    for each in (
        replaced, replaced_by_a_copy, block_replaced, appended, popped, wrapped, with_lora, read_only, shared, tied,
        forward_calls_ours, forward_replaced, fp8_disabled, other_recipe, called_outside_too, skipped, called_outside,
        called_later, frozen_weight, frozen, new_weight, weight_subclass, int8_weight_only, float8_weight_only,
        linear_8bit, linear_4bit, fp8_linear, float8_codes, parametrized, weight_normed, in_float64,
    )
}  # fmt: skip

NEEDS = {
    "int8_weight_only": "torchao", "float8_weight_only": "torchao", "linear_8bit": "bitsandbytes",
    "linear_4bit": "bitsandbytes", "fp8_linear": "transformers",
}  # fmt: skip

_OF_CODES = (
    r"^TypeError: .*weight_scale_inv|finegrained-fp8 kernel unavailable"  # transformers' own
    r"|^RuntimeError: (expected m1 and m2|mat1 and mat2).*Float8"  # torch's, of a plain layer
)
REFUSED = {
    "fp8_linear": _OF_CODES,
    "float8_codes": _OF_CODES,
    "in_float64": r"^(Type|Value|Runtime)Error: .*(dtype|float64|[Dd]ouble)",
}
"""Clear errors of changes that cannot work."""

MUST_BE_REFUSED = {"fp8_linear", "float8_codes"}
NOT_FOR_CHAINS = {"popped", "shared", "tied", "skipped", "called_outside", "called_later"}
"""The sizes of a chain's layers differ."""
