"""What users do to layers of a model, each as they write it."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
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


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Reader(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight, self.inner.bias)


class LoRA(nn.Module):
    def __init__(self, base_layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer, dtype = base_layer.requires_grad_(False), base_layer.weight.dtype
        self.lora_A = nn.Linear(base_layer.in_features, rank, False, dtype=dtype)
        self.lora_B = nn.Linear(rank, base_layer.out_features, False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


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
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].codes.clone(), args[0].scale.clone())
        return func(*(each.codes * each.scale if isinstance(each, cls) else each for each in args), **kwargs)


def _like(layer: nn.Linear, state: bool = False) -> nn.Linear:
    fresh = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, dtype=layer.weight.dtype)
    if state:
        fresh.load_state_dict(layer.state_dict())
    return fresh


class Site:
    """One layer of one block of a model in a loop, and what may happen to it; it keeps no module alive.

    Attributes:
        path: the layer's name in its block.
        number: which change this is; sizes of new layers are made of it.
        outside: layers that the loop calls before each step, outside the region.
        later: what the loop calls after the first step.
        plain: layers that must compute what others, made without the package, compute.
    """

    def __init__(self, net: nn.Module, block: nn.Module, path: str, number: int, recipe: str) -> None:
        self.net, self._block, self.path, self.number, self.recipe = net, ref(block), path, number, recipe
        self.outside: list[ref[nn.Module]] = []
        self.later: list[Callable[[], object]] = []
        self.plain: list[tuple[ref[nn.Module], nn.Module]] = []

    @property
    def blocks(self) -> Any:
        return self.net.model.layers if hasattr(self.net, "model") else self.net.blocks

    @property
    def block(self) -> Any:
        return self._block()

    @property
    def parent(self) -> Any:
        return self.block.get_submodule(self.path.rpartition(".")[0])

    @property
    def layer(self) -> Any:
        return self.block.get_submodule(self.path)

    @layer.setter
    def layer(self, layer: nn.Module) -> None:
        setattr(self.parent, self.path.rpartition(".")[2], layer)

    @property
    def other(self) -> Any:
        """A block beside this one that is not at an end."""
        blocks = [each for each in self.blocks[1:-1] if each is not self.block]
        return blocks[self.number % len(blocks)]

    def _branch(self) -> Any:
        """What is left out: of a residual block all, which then is the identity."""
        return self.block if isinstance(self.block, Block) else self.parent

    # --- Structure

    def replaced(self) -> None:
        self.layer = _like(self.layer)

    def replaced_by_a_copy(self) -> None:
        self.layer = _like(self.layer, state=True)

    def siblings_replaced(self) -> None:
        for name, layer in [*self.parent.named_children()]:
            if isinstance(layer, nn.Linear):
                setattr(self.parent, name, _like(layer))

    def appended(self) -> None:
        last, size = self.blocks[-1], 97 + self.number
        if isinstance(last, Block):
            block: nn.Module = Block(size, last.fc1.bias is not None)
        elif isinstance(last, nn.Sequential):
            block = nn.Sequential(nn.Linear(last[0].out_features, size), nn.GELU())
        else:
            block = type(last)(self.net.config, len(self.blocks))
            self.net.config.num_hidden_layers += 1
        self.blocks.append(block.to(next(last.parameters()).dtype))

    def popped(self) -> None:
        del self.blocks[[*self.blocks].index(self.block)]
        if hasattr(self.net, "model"):
            self.net.config.num_hidden_layers -= 1

    def wrapped(self) -> None:
        self.layer = Wrapper(self.layer)

    def with_lora(self) -> None:
        self.layer = LoRA(self.layer, 3 + self.number)

    def only_read(self) -> None:
        self.layer = Reader(self.layer)

    def shared(self) -> None:
        for name in ("fc1", "fc2") if isinstance(self.block, Block) else (self.path,):
            parent, _, attribute = name.rpartition(".")
            setattr(self.other.get_submodule(parent), attribute, self.block.get_submodule(name))

    def tied(self) -> None:
        if isinstance(self.block, Block):
            self.other.fc1, self.other.fc2 = _like(self.block.fc1), _like(self.block.fc2)
        self.other.get_submodule(self.path).weight = self.layer.weight

    # --- Calls

    def forward_calls_ours(self) -> None:
        ours = self.layer.forward
        self.layer.forward = lambda x: ours(x)

    def forward_replaced(self) -> None:
        layer = ref(self.layer)
        self.layer.forward = lambda x: F.linear(x, layer().weight, layer().bias)

    def _under(self, **region: Any) -> None:
        forward = self.parent.forward

        def inside(*args: Any, **kwargs: Any) -> Any:
            with fp8_autocast(**region):
                return forward(*args, **kwargs)

        self.parent.forward = inside

    def fp8_disabled(self) -> None:
        self._under(enabled=False)

    def other_recipe(self) -> None:
        self._under(fp8_recipe="rowwise" if self.recipe == "tensorwise" else "tensorwise")

    def skipped(self) -> None:
        is_residual = isinstance(self.block, Block)
        self._branch().forward = lambda x: x if is_residual else torch.zeros_like(x)

    def called_outside_too(self) -> None:
        self.outside.append(ref(self.layer))

    def called_outside(self) -> None:
        self.skipped()
        self.called_outside_too()

    def called_later(self) -> None:
        self.skipped()
        branch = ref(self._branch())
        self.later.append(lambda: vars(branch()).pop("forward"))

    # --- Weights

    def frozen_weight(self) -> None:
        self.layer.weight.requires_grad_(False)

    def frozen(self) -> None:
        self.layer.requires_grad_(False)

    def new_weight(self) -> None:
        self.layer.weight = nn.Parameter(torch.randn_like(self.layer.weight) / 8)

    def parametrized(self) -> None:
        parametrize.register_parametrization(self.layer, "weight", Doubled())

    def weight_normed(self) -> None:
        parametrizations.weight_norm(self.layer)

    def in_float64(self) -> None:
        self.layer.to(torch.float64)

    def weight_subclass(self) -> None:
        plain, weight = _like(self.layer, state=True), self.layer.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        quantized = Int8Weight((weight / scale).round().to(torch.int8), scale)
        plain.load_state_dict({**plain.state_dict(), "weight": quantized.codes * scale})
        self.layer.weight = nn.Parameter(quantized, requires_grad=False)
        self.plain.append((ref(self.layer), plain))

    def _of_torchao(self, config: str) -> None:
        torchao: Any = importlib.import_module("torchao.quantization")
        layer, plain = self.layer, Wrapper(_like(self.layer, state=True))
        torchao.quantize_(plain, getattr(torchao, config)())
        torchao.quantize_(self.parent, getattr(torchao, config)(), lambda module, _: module is layer)
        self.plain.append((ref(layer), plain.inner))

    def int8_weight_only(self) -> None:
        self._of_torchao("Int8WeightOnlyConfig")

    def float8_weight_only(self) -> None:
        self._of_torchao("Float8WeightOnlyConfig")

    def _of_bitsandbytes(self, name: str, **options: Any) -> None:
        old, cls = self.layer, getattr(importlib.import_module("bitsandbytes.nn"), name)
        layer = cls(old.in_features, old.out_features, old.bias is not None, **options)
        layer.load_state_dict({key: value.clone() for key, value in old.state_dict().items()})
        self.layer = layer.to("cpu")  # which quantizes
        self.plain.append((ref(layer), copy.deepcopy(layer)))

    def linear_8bit(self) -> None:
        self._of_bitsandbytes("Linear8bitLt", has_fp16_weights=False)

    def linear_4bit(self) -> None:
        self._of_bitsandbytes("Linear4bit", compute_dtype=torch.bfloat16)

    def fp8_linear(self) -> None:
        finegrained: Any = importlib.import_module("transformers.integrations.finegrained_fp8")
        self.layer = layer = finegrained.FP8Linear(self.layer.in_features, self.layer.out_features, (32, 32))
        layer.weight.data.copy_((100 * torch.randn(layer.weight.shape)).to(layer.weight.dtype))
        layer.weight_scale_inv.data.fill_(1e-3)

    def float8_codes(self) -> None:
        codes = (100 * self.layer.weight.detach()).to(torch.float8_e4m3fn)
        self.layer.weight = nn.Parameter(codes, requires_grad=False)


_NO_CHANGES = ("blocks", "block", "parent", "layer", "other")
CHANGES = [name for name in vars(Site) if not name.startswith("_") and name not in _NO_CHANGES]
NOT_FOR_CHAINS = {"popped", "shared", "tied", "skipped", "called_outside", "called_later"}
"""The sizes of a chain's layers differ."""
OF_BLOCKS = {"skipped", "called_outside", "called_later", "fp8_disabled", "other_recipe", "siblings_replaced"}
"""What happens to all that is called, or is, beside the layer."""
QUANTIZED = {
    "weight_subclass": "torch", "int8_weight_only": "torchao", "float8_weight_only": "torchao",
    "linear_8bit": "bitsandbytes", "linear_4bit": "bitsandbytes", "fp8_linear": "transformers",
}  # fmt: skip
"""Changes to what is in the dtype of the weights, with the packages that they need."""

_OF_CODES = (
    r"^TypeError: .*weight_scale_inv|finegrained-fp8 kernel unavailable"  # transformers' own
    r"|^RuntimeError: (expected m1 and m2|mat1 and mat2).*Float8"  # torch's, of a plain layer
)
MUST_BE_REFUSED = {"fp8_linear": _OF_CODES, "float8_codes": _OF_CODES}
MAY_BE_REFUSED = {"in_float64": r"^(Type|Value|Runtime)Error: .*(dtype|float64|[Dd]ouble)"}
"""Changes that cannot work, with their clear errors."""
