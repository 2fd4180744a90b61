"""Weights of other packages' tensor classes: they are left alone, before and after the conversion."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import lightning_fp8
from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.convert.policy import Policy
from lightning_fp8.modules.linear_layer import LinearLayer, foreign_weight
from lightning_fp8.torchao.float8 import convert_to_float8_training

_aten = torch.ops.aten
DECODED = (_aten.mm.default, _aten.addmm.default, _aten.t.default, _aten.linear.default)
KEPT = (_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default, _aten.view.default)


class Coded(Tensor):
    """A weight in multiples of 1/64, as int8 codes; products and moves are all that it supports."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, dtype: torch.dtype = torch.float32) -> Coded:
        made: Any = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)  # type: ignore[attr-defined]
        made.codes = codes
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> Coded:
        return cls(parts["codes"], dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return "Coded()"

    def values(self) -> Tensor:  # type: ignore[override]
        return self.codes.to(self.dtype) / 64

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function in KEPT:
            return cls(args[0].codes, (kwargs or {}).get("dtype") or args[0].dtype)
        if function in DECODED:
            return function(*tree_map_only(Coded, Coded.values, args))
        raise NotImplementedError(f"Coded has no {function}")


class Swapped(nn.Parameter):
    """A parameter that says what ``F.linear`` of it is, as bitsandbytes' and observers' do."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return -result if function is F.linear else result


def coded(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(Coded((64 * weight.detach()).round().to(torch.int8), weight.dtype), requires_grad=False)


def swapped(weight: Tensor) -> nn.Parameter:
    return Swapped(weight.detach().clone())


MAKERS = [coded, swapped]
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: lightning_fp8.convert_module(model, first_last_layers_bf16=False),
    "torchao": convert_to_float8_training,
    "plugin": lambda model: Fabric(
        accelerator="cpu",
        devices=1,
        plugins=lightning_fp8.FP8FabricPrecision("tensorwise", first_last_layers_bf16=False),
    ).setup_module(model),
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)).to(torch.bfloat16)


def _gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    leaf = x.clone().requires_grad_()
    with lightning_fp8.fp8_autocast(fp8_recipe="tensorwise"):
        y = model(leaf)
    return y, *torch.autograd.grad(
        y.float().square().sum(), [leaf, *(p for p in model.parameters() if p.requires_grad)]
    )


@pytest.mark.filterwarnings(
    "ignore:no layer of the model", "ignore:fp8_autocast ran nothing", "ignore:convert_to_float8"
)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_foreign_weight_computes_what_it_does_without_fp8(way: str, make: Callable[..., Any], before: bool) -> None:
    """The other layer runs in FP8 all the same."""
    model, x = _model(), torch.randn(8, 32, dtype=torch.bfloat16)
    if before:
        model[0].weight = make(model[0].weight)
    converted = WAYS[way](model)
    if not before:
        model[0].weight = make(model[0].weight)
    found = []
    model[0].register_forward_hook(lambda module, inputs, y: found.append((inputs[0], y)))
    weight = model[0].weight
    _, dx, *_ = _gradients(converted, x)
    ((given, y),) = found
    assert torch.equal(y, F.linear(given, weight, model[0].bias))
    assert torch.isfinite(dx).all()
    assert dx.abs().sum() > 0
    assert model[0].weight is weight
    assert type(model[1]) is lightning_fp8.Linear
    assert model[1].record.fp8 == 1
    if isinstance(model[0], LinearLayer):
        assert (model[0].record.fp8, model[0].record.high_precision) == (0, 1)
    assert foreign_weight(model[0]) == f"its weight is a {type(weight).__name__}"
    rows = plan_conversion(model, Policy(first_last_layers_bf16=False)).summary.layers
    assert [(row.fp8, row.reason) for row in rows] == [(False, foreign_weight(model[0])), (True, "")]


@pytest.mark.parametrize("make", MAKERS)
def test_gradients_are_those_of_the_layer_without_fp8(make: Callable[..., Any]) -> None:
    layer, x = nn.Linear(32, 48), torch.randn(8, 32)
    layer.weight = make(layer.weight)
    expected = _gradients(copy.deepcopy(layer), x) if make is swapped else None
    plain = nn.Linear(32, 48)
    plain.bias = nn.Parameter(layer.bias.detach().clone())
    values = layer.weight.detach().values() if make is coded else -layer.weight.detach()
    plain.weight = nn.Parameter(torch.Tensor(values), requires_grad=layer.weight.requires_grad)
    layer.__class__ = lightning_fp8.Linear
    found = _gradients(layer, x)
    if expected is None:
        expected = _gradients(plain, x)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP fc1", "LayerNormMLP fc2", "is_first_microbatch"])
def test_other_kinds_of_layers_run_in_high_precision_too(kind: str, make: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 32)
    layer: Any
    if kind.startswith("LayerNormMLP"):
        layer, name = lightning_fp8.LayerNormMLP(32, 64), f"{kind.split()[1]}_weight"
    else:
        layer, name = lightning_fp8.LayerNormLinear(32, 48), "weight"
    setattr(layer, name, make(getattr(layer, name)))
    expected = layer(x)
    layer.record.clear()
    first = True if kind == "is_first_microbatch" else None
    with lightning_fp8.fp8_autocast():
        assert torch.equal(layer(x, is_first_microbatch=first), expected)
    assert (layer.record.fp8, layer.record.high_precision) == (0, 1)
    assert foreign_weight(layer) == f"its {name} is a {make(torch.ones(2, 2)).__class__.__name__}"


def test_conv1d_computes_what_it_does_without_fp8() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    x, model = torch.randn(2, 8, 32), nn.Sequential(conv1d(48, 32))
    model[0].weight = coded(model[0].weight)
    expected = torch.addmm(model[0].bias, x.view(-1, 32), model[0].weight.values()).view(2, 8, 48)
    plain = nn.Sequential(conv1d(48, 32))
    plain[0].bias = model[0].bias
    lightning_fp8.convert_module(plain, first_last_layers_bf16=False)
    plain[0].weight = model[0].weight
    with lightning_fp8.fp8_autocast(fp8_recipe="tensorwise"):
        assert torch.equal(plain(x), expected)


def test_split_parameters_are_refused() -> None:
    layer: Any = lightning_fp8.Linear(32, 64, parameters_split=("q", "k"))
    layer.q_weight = coded(layer.q_weight)
    with lightning_fp8.fp8_autocast(), pytest.raises(TypeError, match="its q_weight is a Coded, which cannot be conc"):
        layer(torch.randn(4, 32))


@pytest.mark.parametrize("make", MAKERS)
def test_compiled_code_and_recomputation(make: Callable[..., Any]) -> None:
    model, x = _model(), torch.randn(8, 32, dtype=torch.bfloat16)
    convert_to_float8_training(model)
    model[0].weight = make(model[0].weight)
    expected = model(x)
    assert torch.equal(torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=False), expected)
    if make is coded:  # Dynamo would have to inline the other's __torch_function__
        assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)


class Tagged(nn.Parameter):
    """A parameter that a user tells from others, for example to give it another optimizer."""


def test_classes_that_only_carry_a_weight_run_in_fp8() -> None:
    x = torch.randn(4, 32)
    for make in (Tagged, lambda data: data.clone(), nn.Buffer, lambda data: nn.Parameter(data, requires_grad=False)):
        layer: Any = lightning_fp8.Linear(32, 48)
        weight = make(layer.weight.detach())
        del layer.weight
        layer.weight = weight
        with lightning_fp8.fp8_autocast(fp8_recipe="tensorwise"):
            layer(x)
        assert layer.record.fp8 == 1
        assert foreign_weight(layer) == ""
    assert foreign_weight(nn.LazyLinear(4)) == ""
    assert foreign_weight(nn.ReLU()) == ""


@pytest.mark.parametrize(
    "config",
    [
        *("Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"),
        *("IntxWeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"),
    ],
)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_weights_that_torchao_quantizes(config: str, before: bool) -> None:
    quantization: Any = pytest.importorskip("torchao.quantization")
    quantized, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(8, 64)
    model = copy.deepcopy(quantized)
    try:
        quantization.quantize_(quantized, getattr(quantization, config)())
        expected = quantized(x)
    except (AssertionError, ImportError) as error:
        pytest.skip(str(error))
    for step in (lightning_fp8.convert_module, None)[:: 1 if before else -1]:
        if step is None:
            quantization.quantize_(model, getattr(quantization, config)())
        else:
            convert_to_float8_training(model)
    assert torch.equal(model(x), expected)
    assert type(quantized[0].weight).__name__ in foreign_weight(model[0])


@pytest.mark.parametrize("name", ["Params4bit", "Int8Params"])
def test_parameters_of_bitsandbytes(name: str) -> None:
    parameters = getattr(importlib.import_module(pytest.importorskip("bitsandbytes").__name__ + ".nn"), name)
    layer = nn.Linear(64, 64)
    layer.weight = parameters(layer.weight.detach(), requires_grad=False)
    (row,) = plan_conversion(layer, Policy(first_last_layers_bf16=False)).summary.layers
    assert (row.fp8, row.reason) == (False, f"its weight is {'an' if name[0] == 'I' else 'a'} {name}")


def test_a_dtensor_is_foreign_if_its_pieces_are(one_rank: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard

    layer = nn.Linear(32, 16)
    for local, expected in ((layer.weight.detach(), ""), (coded(layer.weight), "its weight is a Coded")):
        layer.weight = nn.Parameter(
            DTensor.from_local(local, one_rank, [Shard(0)], run_check=False), requires_grad=False
        )
        assert foreign_weight(layer) == expected
