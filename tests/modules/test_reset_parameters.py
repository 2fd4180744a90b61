"""``reset_parameters`` of the layers: what they began with, also for those that were made on meta."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import (
    DotProductAttention,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    TransformerLayer,
    convert_module,
    fp8_autocast,
    fp8_model_init,
)

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda **device: Linear(48, 32, **device),
    "linear with a method": lambda **device: Linear(48, 32, init_method=nn.init.xavier_normal_, **device),
    "norm and linear": lambda **device: LayerNormLinear(48, 32, **device),
    "zero-centered": lambda **device: LayerNormLinear(48, 32, zero_centered_gamma=True, **device),
    "no bias": lambda **device: LayerNormLinear(48, 32, bias=False, normalization="RMSNorm", **device),
    "mlp": lambda **device: LayerNormMLP(48, 64, activation="swiglu", **device),
    "two methods": lambda **device: LayerNormMLP(
        48, 64, init_method=nn.init.ones_, output_layer_init_method=nn.init.xavier_normal_, **device
    ),
    "split norm and linear": lambda **device: LayerNormLinear(48, 96, parameters_split=["q", "k", "v"], **device),
    "attention": lambda **device: MultiheadAttention(32, 2, input_layernorm=True, **device),
    "decoder": lambda **device: TransformerLayer(32, 64, 2, layer_type="decoder", **device),
}


def spoiled(module: nn.Module) -> nn.Module:
    """What an allocation may hold."""
    for parameter in module.parameters():
        nn.init.constant_(parameter, math.nan)
    return module


def reset(module: nn.Module) -> None:
    """As Lightning and FSDP do it: each module that has parameters of its own."""
    for part in module.modules():
        if any(True for _ in part.parameters(recurse=False)):
            part.reset_parameters()  # type: ignore[operator]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_made_on_meta_begins_as_one_that_was_not(name: str) -> None:
    torch.manual_seed(3)
    expected = LAYERS[name]()
    module = spoiled(LAYERS[name](device="meta").to_empty(device="cpu"))
    assert all(parameter.isnan().all() for parameter in module.parameters())
    torch.manual_seed(3)
    reset(module)
    for (key, parameter), other in zip(module.named_parameters(), expected.parameters()):
        assert torch.equal(parameter, other), key
        assert not key.endswith("bias") or not parameter.any(), key


def test_a_layer_that_was_on_meta_trains_in_fp8() -> None:
    module = TransformerLayer(32, 64, 2, hidden_dropout=0, attention_dropout=0, device="meta").to_empty(device="cpu")
    reset(spoiled(module))
    x = torch.randn(16, 2, 32)
    with fp8_autocast(fp8_recipe="tensorwise"):
        y = module(x)
    y.square().mean().backward()
    with torch.no_grad():
        torch.testing.assert_close(y, module(x), rtol=0.2, atol=0.2)
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Transformer Engine's weights, one after the other."""
    torch.manual_seed(seed)
    return [torch.empty(shape).normal_(0, 0.023) for shape in shapes]


@pytest.mark.parametrize("layer", [Linear, LayerNormLinear])
@pytest.mark.parametrize("split", [None, {"q": 64, "kv": 32}])
def test_weights_without_a_method_are_normal_and_biases_zero(layer: type[Any], split: dict[str, int] | None) -> None:
    rows = (96,) if split is None else tuple(split.values())
    torch.manual_seed(5)
    module = layer(400, 96, parameters_split=split)
    for seed in (5, 6):
        weights, biases = module.weights_and_biases()
        for weight, bias, expected in zip(weights, biases, drawn(seed, *((n, 400) for n in rows)), strict=True):
            assert torch.equal(weight, expected)
            assert not bias.any()
        spoiled(module)
        torch.manual_seed(6)
        module.reset_parameters()


def test_weights_in_fp8_start_as_the_casts_of_the_same_values() -> None:
    torch.manual_seed(5)
    with fp8_model_init():
        module = Linear(48, 32)
    for seed in (5, 6):
        (expected,) = drawn(seed, (32, 48))
        values = module.weight.detach().float() + 0  # not a tensor in FP8
        torch.testing.assert_close(values, expected, rtol=1 / 16, atol=expected.abs().max().item() / 448 / 8)
        torch.manual_seed(6)
        module.reset_parameters()


def test_a_converted_layer_keeps_torchs_method() -> None:
    expected = nn.Linear(48, 32)
    module = copy.deepcopy(expected)
    convert_module(module, first_last_layers_bf16=False)
    assert type(module) is Linear
    for layer in (module, expected):
        torch.manual_seed(6)
        layer.reset_parameters()
    assert torch.equal(module.weight, expected.weight)
    assert torch.equal(module.bias, expected.bias)


@pytest.mark.parametrize("layer", [Linear, LayerNormLinear])
def test_a_method_is_called_on_each_part(layer: type[Any]) -> None:
    seen: list[Tensor] = []

    def init_method(weight: Tensor) -> None:
        seen.append(weight)
        nn.init.constant_(weight, len(seen))

    module = layer(16, 12, parameters_split={"q": 8, "kv": 4}, init_method=init_method)
    assert [id(weight) for weight in seen] == [id(module.q_weight), id(module.kv_weight)]
    module.reset_parameters()
    assert (module.q_weight == 3).all()
    assert (module.kv_weight == 4).all()


@pytest.mark.parametrize("init_method", [None, nn.init.ones_])
def test_the_tracker_is_forked_again(init_method: Any) -> None:
    class Tracker:
        forked: list[str] = []  # noqa: RUF012

        def fork(self, name: str) -> Any:
            self.forked.append(name)
            return torch.random.fork_rng()

    tracker = Tracker()
    options = {"get_rng_state_tracker": lambda: tracker, "rng_tracker_name": "weights"}
    module = Linear(16, 8, init_method=init_method, **options)  # type: ignore[arg-type]
    module.reset_parameters()
    assert tracker.forked == ["weights", "weights"]


def test_learned_offsets_begin_at_zero() -> None:
    module = spoiled(DotProductAttention(4, 16, softmax_type="learnable"))
    module.reset_parameters()  # type: ignore[operator]
    assert torch.equal(module.softmax_offset, torch.zeros(4))  # type: ignore[arg-type]


def test_a_method_that_cannot_be_pickled_is_missed_only_where_it_is_needed() -> None:
    module = LayerNormMLP(16, 32, init_method=lambda weight: nn.init.constant_(weight, 0.5))
    loaded = pickle.loads(pickle.dumps(module))
    x = torch.randn(4, 16)
    assert torch.equal(loaded(x), module(x))
    with pytest.raises(RuntimeError, match=r"was pickled, and <function .*<lambda>.*cannot be"):
        loaded.reset_parameters()
    kept = spoiled(copy.deepcopy(module))
    kept.reset_parameters()  # type: ignore[operator]
    assert (kept.fc1_weight == 0.5).all()  # type: ignore[union-attr]
    other = pickle.loads(pickle.dumps(Linear(16, 8, init_method=nn.init.ones_)))
    other.reset_parameters()
    assert (other.weight == 1).all()


@pytest.mark.parametrize(
    "layer", [lambda **how: LayerNormLinear(32, 32, **how), lambda **how: LayerNormMLP(32, 64, **how)]
)
def test_a_weight_that_is_filled_anew_is_cast_anew(layer: Callable[..., nn.Module]) -> None:
    """Also by a method that leaves no trace on the tensor."""
    module = layer(init_method=lambda weight: weight.data.normal_(0, 0.1))
    x = torch.randn(16, 32)
    with fp8_autocast(fp8_recipe="tensorwise"):
        before = module(x, is_first_microbatch=True)
        module.reset_parameters()  # type: ignore[operator]
        after = module(x, is_first_microbatch=False)
        assert torch.equal(after, module(x))
    assert not torch.equal(after, before)


@pytest.mark.parametrize(
    "layer",
    [
        Linear(16, 16, device="meta"),
        LayerNormLinear(16, 16, device="meta"),
        LayerNormMLP(16, 16, device="meta"),
        LayerNorm(16, device="meta"),
        RMSNorm(16, device="meta"),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_parameters_on_meta_are_not_filled(layer: Any) -> None:
    with pytest.raises(RuntimeError, match=r"parameters are on meta and have no memory; call to_empty\(device="):
        layer.reset_parameters()
    with torch.device("meta"):  # all that a model does while it is made
        layer.reset_parameters()
    layer.to_empty(device="cpu").reset_parameters()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
