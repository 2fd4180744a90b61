"""fp8_model_init: weights that are kept in FP8 alone, for inference, frozen bases and training with masters."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

from lightning_fp8 import (
    Float8CurrentScaling,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    TransformerLayer,
    convert_module,
    export_te_state_dict,
    fp8_autocast,
    fp8_model_init,
    with_master_weights,
)
from lightning_fp8.weights.fp8_tensor import FP8Tensor, quantized_tensor
from lightning_fp8.weights.model_init import TENSOR_CAST
from tests.small import Regression, fp8_trainer, mlp, regression_data
from tests.tiers import covering

POWER_2 = Float8CurrentScaling(power_2_scale=True)
"""Its cast of weights is the one of FP8 weights."""

RECIPES = [POWER_2, "tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"]


def rounded(values: Tensor) -> Tensor:
    """``values`` rounded to E4M3 after a scale, a power of two; computed in float64."""
    scale = 2.0 ** torch.floor(torch.log2(448 / values.double().abs().max()))
    return ((values.double() * scale).float().to(torch.float8_e4m3fn).double() / scale).to(values.dtype)


def llama(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=64, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).bfloat16().eval()  # type: ignore[no-any-return]


def in_fp8(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if isinstance(parameter, FP8Tensor)]


def bytes_of_tensors() -> int:
    """Of every storage that a living tensor has, FP8Tensors' own aside, which have no memory."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    dense = [each.untyped_storage() for each in tensors if each.layout is torch.strided]
    storages = {each.data_ptr(): each.nbytes() for each in dense}
    return sum(size for pointer, size in storages.items() if pointer)


# --- What is kept -----------------------------------------------------------------------------------------------------


def test_a_weight_takes_one_byte() -> None:
    before = bytes_of_tensors()
    with fp8_model_init():
        layer = Linear(512, 256, bias=False, dtype=torch.bfloat16)
    history = sum(each.nbytes for each in vars(layer.history).values() if isinstance(each, Tensor))
    assert bytes_of_tensors() - before - history == 512 * 256 + 4  # a byte each, and the scale
    del layer
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False, dtype=torch.bfloat16) for _ in range(4)))
    converted = convert_module(copy.deepcopy(model), first_last_layers_bf16=False)
    before = bytes_of_tensors()
    with fp8_model_init():
        convert_module(converted, first_last_layers_bf16=False)
    assert before - bytes_of_tensors() == 4 * (256 * 256 - 4)  # of two bytes each; a scale has four


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("make", [
    lambda: Linear(64, 96, parameters_split=("a", "b"), dtype=torch.bfloat16),
    lambda: LayerNormLinear(64, 96, dtype=torch.bfloat16),
    lambda: LayerNormMLP(64, 128, activation="swiglu", dtype=torch.bfloat16),
    lambda: MultiheadAttention(64, 4, attention_dropout=0.0, params_dtype=torch.bfloat16),
    lambda: TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16),
], ids=["split", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer"])  # fmt: skip
def test_layers_compute_with_the_values(make: Callable[[], nn.Module], recipe: Any) -> None:
    """As the same layer whose plain weights hold the rounded values; to the bit where the casts are the same."""
    plain = make()
    with fp8_model_init():
        held = make()
    matrices = [name for name, parameter in plain.named_parameters() if parameter.dim() == 2]
    assert in_fp8(held) == matrices
    assert plain.load_state_dict(held.state_dict())
    results: list[list[Any]] = []
    for module in (plain, held):
        x = torch.randn(16, 2, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(2)).requires_grad_()
        with fp8_autocast(fp8_recipe=recipe):
            y = module(x)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).bfloat16())
        results.append([y, x.grad, *(parameter.grad for parameter in module.parameters())])
    largest = max(each.norm() for each in results[0])
    for of_plain, of_held in zip(*results):
        if recipe in ("delayed", "tensorwise"):  # whose scale of the plain weight is no power of two
            # A bias of keys has no effect; its gradient is what rounding leaves.
            assert (of_plain - of_held).norm() <= 0.15 * of_plain.norm() + 1e-3 * largest
        else:
            assert torch.equal(of_plain, of_held)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_errors_are_those_of_casts_of_plain_weights(recipe: str) -> None:
    """Against a layer of torch's in float64: the other scale, a power of two, costs nothing of the gradients."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return TransformerLayer(128, 512, 4, hidden_dropout=0.0, attention_dropout=0.0)

    plain = make()
    with fp8_model_init():
        held = make()
    activation = functools.partial(F.gelu, approximate="tanh")
    exact = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, activation=activation, norm_first=True).double()
    qkv, mlp = "self_attention.layernorm_qkv", "layernorm_mlp"
    sources = {
        "self_attn.in_proj_weight": [f"{qkv}.{part}_weight" for part in ("query", "key", "value")],
        "self_attn.in_proj_bias": [f"{qkv}.{part}_bias" for part in ("query", "key", "value")],
        "self_attn.out_proj.weight": ["self_attention.proj.weight"],
        "self_attn.out_proj.bias": ["self_attention.proj.bias"],
        "linear1.weight": [f"{mlp}.fc1_weight"],
        "linear1.bias": [f"{mlp}.fc1_bias"],
        "linear2.weight": [f"{mlp}.fc2_weight"],
        "linear2.bias": [f"{mlp}.fc2_bias"],
        "norm1.weight": [f"{qkv}.layer_norm_weight"],
        "norm1.bias": [f"{qkv}.layer_norm_bias"],
        "norm2.weight": [f"{mlp}.layer_norm_weight"],
        "norm2.bias": [f"{mlp}.layer_norm_bias"],
    }
    values = plain.state_dict()
    exact.load_state_dict({name: torch.cat([values[part] for part in parts]) for name, parts in sources.items()})
    generator = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(64, 2, 128, generator=generator) for _ in range(2))
    mask = nn.Transformer.generate_square_subsequent_mask(64, dtype=torch.float64)
    exact(x.double(), src_mask=mask, is_causal=True).backward(gradient.double())

    def gradients(layer: nn.Module, names: Iterable[str]) -> Tensor:
        return torch.cat([layer.get_parameter(name).grad.flatten().double() for name in names])  # type: ignore[union-attr]

    wanted = gradients(exact, sources)
    decibels: list[float] = []
    for layer in (plain, held):
        with fp8_autocast(fp8_recipe=recipe):
            y = layer(x)
        y.backward(gradient)
        errors = gradients(layer, itertools.chain.from_iterable(sources.values())) - wanted
        decibels.append(float(10 * torch.log10(wanted.square().sum() / errors.square().sum())))
    assert len(in_fp8(held)) == 6
    assert min(decibels) > 20
    assert abs(decibels[0] - decibels[1]) < 0.5, decibels


def test_blockwise_weights_keep_their_blocks() -> None:
    torch.manual_seed(0)
    plain = Linear(256, 256, dtype=torch.bfloat16)
    plain.weight.data[:128] *= 2.0**14  # the others are 0 by one scale
    held = copy.deepcopy(plain)
    with fp8_model_init(recipe="blockwise"):
        convert_module(held, first_last_layers_bf16=False)
    x = torch.randn(32, 256, dtype=torch.bfloat16)
    with fp8_autocast(fp8_recipe="blockwise"), torch.no_grad():
        assert torch.equal(held(x), plain(x))
    assert not torch.equal(held.weight.dequantize(), rounded(plain.weight))
    again = copy.deepcopy(held)
    again.load_state_dict(held.state_dict())
    assert torch.equal(again.weight.dequantize(), held.weight.dequantize())


def test_regions_nest_and_decorate() -> None:
    @fp8_model_init()
    def make() -> list[nn.Module]:
        with fp8_model_init(enabled=False):
            inner = Linear(16, 16)
        return [inner, Linear(16, 16)]

    assert [bool(in_fp8(layer)) for layer in [*make(), Linear(16, 16)]] == [False, True, False]
    for wrong in ({"enabled": 1.5}, {"preserve_high_precision_init_val": "yes"}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            fp8_model_init(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rowise"):
        fp8_model_init(recipe="rowise")


def test_initial_values_are_kept_on_demand() -> None:
    torch.manual_seed(0)
    values = Linear(32, 16).weight.detach()
    torch.manual_seed(0)
    with fp8_model_init(preserve_high_precision_init_val=True):
        weight = Linear(32, 16).to(torch.float32).weight
    assert torch.equal(weight, rounded(values))
    assert weight.get_high_precision_init_val().device.type == "cpu"  # type: ignore[operator]
    assert torch.equal(weight.get_high_precision_init_val(), values)  # type: ignore[operator]
    weight.clear_high_precision_init_val()  # type: ignore[operator]
    assert weight.get_high_precision_init_val() is None  # type: ignore[operator]
    with fp8_model_init():
        assert Linear(32, 16).weight.get_high_precision_init_val() is None  # type: ignore[operator]


def test_layers_in_high_precision_and_shared_weights_stay() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    model[3].weight = model[2].weight
    values = model[2].weight.detach().clone()
    objects = [id(parameter) for parameter in model.parameters()]
    with fp8_model_init(), pytest.warns(UserWarning, match="2.weight, 3.weight stay in high precision"):
        convert_module(model, skip=["4"])
    assert in_fp8(model) == ["1.weight"]
    assert [id(parameter) for parameter in model.parameters()] == objects
    assert torch.equal(model[3].weight, values)


@pytest.mark.parametrize("preserved", [False, True])
def test_a_constructed_layer_that_is_judged_is_in_high_precision_again(preserved: bool) -> None:
    torch.manual_seed(0)
    plain = mlp(Linear)
    torch.manual_seed(0)
    with fp8_model_init(preserve_high_precision_init_val=preserved):
        model = mlp(Linear)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert_module(model, skip=["4"])
    assert in_fp8(model) == ["2.weight"]
    assert torch.equal(model[4].weight, plain[4].weight if preserved else rounded(plain[4].weight.detach()))
    assert any("4.weight, 6.weight were constructed in FP8" in str(each.message) for each in caught) is not preserved


# --- Files and copies -------------------------------------------------------------------------------------------------


def test_state_dicts_are_the_unconverted_models() -> None:
    plain = llama()
    held = convert_module(copy.deepcopy(plain))
    with fp8_model_init():
        convert_module(held)
    assert len(in_fp8(held)) == 14
    state = held.state_dict()
    assert {name: (type(value), value.dtype) for name, value in state.items()} == dict.fromkeys(
        plain.state_dict(), (Tensor, torch.bfloat16)
    )
    for name in in_fp8(held):
        assert torch.equal(state[name], rounded(plain.state_dict()[name]))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert plain.load_state_dict(loaded)
    for assign in (False, True):
        other = copy.deepcopy(held)
        for parameter in other.parameters():
            parameter.data.zero_()
        other.load_state_dict(loaded, assign=assign)
        assert in_fp8(other) == in_fp8(held)
        assert all(torch.equal(other.state_dict()[name], value) for name, value in state.items())
    assert all(type(value) is not FP8Tensor for value in export_te_state_dict(held, "2.4.0").values())


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda layer: pickle.loads(pickle.dumps(layer)),
        lambda layer: copy.deepcopy(layer).to(torch.float32).bfloat16(),
        lambda layer: copy.deepcopy(layer).cpu(),
    ],
)
def test_copies_are_in_fp8(copied: Callable[[nn.Module], nn.Module]) -> None:
    with fp8_model_init():
        layer = Linear(32, 16, dtype=torch.bfloat16)
    layer.bias.requires_grad_(False)
    x = torch.randn(8, 32, dtype=torch.bfloat16)
    with fp8_autocast(fp8_recipe="rowwise"):
        layer(x, is_first_microbatch=True)  # keeps a copy, which refers to the weight
        expected = layer(x)
        made = copied(layer)
        assert torch.equal(made(x), expected)
    assert isinstance(made.weight, FP8Tensor)
    assert isinstance(made.weight, nn.Parameter)
    assert (made.weight.requires_grad, made.bias.requires_grad) == (True, False)  # type: ignore[union-attr]


def test_a_layer_on_meta_is_filled_in_fp8() -> None:
    with fp8_model_init():
        layer = Linear(32, 16, device="meta").to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    torch.manual_seed(0)
    assert isinstance(layer.weight, FP8Tensor)
    assert torch.equal(layer.weight.dequantize(), rounded(Linear(32, 16).weight.detach()))


# --- Inference and frozen bases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [POWER_2, "rowwise", "mxfp8"], ids=str)
def test_generation_is_that_of_the_converted_model(recipe: Any) -> None:
    """Of the very weights where the recipe casts them alike; of the rounded ones where it casts them again."""
    converted = convert_module(llama())
    held = copy.deepcopy(converted)
    with fp8_model_init():
        convert_module(held)
    assert len(in_fp8(held)) == 14
    if recipe is not POWER_2:
        with torch.no_grad():
            for name in in_fp8(held):
                converted.get_parameter(name).copy_(rounded(converted.get_parameter(name)))
    prompt = torch.randint(0, 96, (2, 8), generator=torch.Generator().manual_seed(4))
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with fp8_autocast(fp8_recipe=recipe):
        ours, theirs = (model.generate(prompt, **options) for model in (held, converted))  # type: ignore[operator]
    assert torch.equal(ours.sequences, theirs.sequences)
    assert all(torch.equal(one, other) for one, other in zip(ours.logits, theirs.logits))


def test_gpt2s_transposed_weights_are_taken_as_they_are() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=64, n_positions=32)
    converted = convert_module(transformers.GPT2LMHeadModel(config).bfloat16().eval())
    held = copy.deepcopy(converted)
    with fp8_model_init():
        convert_module(held)
    assert len(in_fp8(held)) == 4
    tokens = torch.randint(0, 64, (2, 16))
    with fp8_autocast(fp8_recipe=POWER_2), torch.no_grad():
        assert torch.equal(held(tokens).logits, converted(tokens).logits)


class LoRA(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False, dtype=torch.bfloat16)  # type: ignore[arg-type]
        self.up = nn.Linear(4, base.out_features, bias=False, dtype=torch.bfloat16)  # type: ignore[arg-type]
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def with_adapters(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    model.requires_grad_(False)
    for block in model.model.layers:  # type: ignore[union-attr]
        block.self_attn.q_proj = LoRA(block.self_attn.q_proj)  # type: ignore[union-attr]
        block.mlp.down_proj = LoRA(block.mlp.down_proj)  # type: ignore[union-attr]
    return model.train()


def test_adapters_on_a_frozen_base_train_as_on_plain_weights() -> None:
    converted = convert_module(llama())
    held = copy.deepcopy(converted)
    with fp8_model_init():
        convert_module(held)
    tokens = torch.randint(0, 96, (4, 16), generator=torch.Generator().manual_seed(5))
    losses: list[list[float]] = []
    for model in (with_adapters(converted), with_adapters(held)):
        before = {name: value.clone() for name, value in model.state_dict().items() if "base" in name}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, 2e-2)
        losses.append([])
        for _ in range(6):
            optimizer.zero_grad()
            with fp8_autocast(fp8_recipe=POWER_2):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
        assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)
        assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert losses[0] == losses[1]
    assert losses[1][-1] < losses[1][0] - 0.1


def test_adapters_are_merged_into_the_weight() -> None:
    with fp8_model_init():
        layer = Linear(32, 16, dtype=torch.bfloat16)
    before = layer.weight.dequantize()
    layer.weight.data += 1
    assert isinstance(layer.weight, FP8Tensor)
    assert torch.equal(layer.weight.dequantize(), rounded(before + 1))


def test_values_assigned_to_data_are_cast() -> None:
    """As peft and ``vector_to_parameters`` write to weights."""
    layer = two_layers()[0]
    new = torch.randn(128, 64, dtype=torch.bfloat16)
    layer.weight.data = new
    assert isinstance(layer.weight, FP8Tensor)
    assert torch.equal(layer.weight.dequantize(), rounded(new))
    changed = layer.weight.data.clone()
    changed += 1
    layer.weight.data = changed
    assert torch.equal(layer.weight.dequantize(), rounded(rounded(new) + 1))
    message = r"data of shape \[3\] on cpu is assigned to an FP8 weight of shape \[128, 64\]"
    with pytest.raises(ValueError, match=message):
        layer.weight.data = torch.zeros(3, dtype=torch.bfloat16)


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize("safe_merge", [False, True])
def test_adapters_of_peft_train_and_merge(safe_merge: bool) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = two_layers()
    model: Any = get_peft_model(base, LoraConfig(target_modules=["0", "2"], r=4))
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], 1e-2)
    x, target = (torch.randn(64, 64, dtype=torch.bfloat16) for _ in range(2))
    losses = []
    for _ in range(16):
        with fp8_autocast(fp8_recipe="tensorwise"):
            loss = F.mse_loss(model(x).float(), target.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    before = base[0].base_layer.weight.dequantize()
    adapted = model(x).detach()
    delta = base[0].get_delta_weight("default")
    merged = model.merge_and_unload(safe_merge=safe_merge)
    # Half a step of E4M3, or two of them where the sum is rounded twice.
    torch.testing.assert_close(merged[0].weight.dequantize().float(), before.float() + delta, rtol=1 / 8, atol=1e-3)
    assert float((merged(x) - adapted).norm() / adapted.norm()) < 0.1


RECIPES_OF_WEIGHTS = [POWER_2, "tensorwise", "delayed", "rowwise"]


def passed(model: Any, recipe: Any) -> list[Tensor]:
    """The output and all gradients."""
    model.zero_grad()
    x = torch.randn(32, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(6)).requires_grad_()
    with fp8_autocast(fp8_recipe=recipe):
        y = model(x)
    y.sum().backward()
    assert x.grad is not None
    return [y, x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def two_layers() -> nn.Sequential:
    with fp8_model_init():
        return nn.Sequential(Linear(64, 128, dtype=torch.bfloat16), nn.GELU(), Linear(128, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "recipe", covering(RECIPES_OF_WEIGHTS, lambda recipe: {recipe} & {POWER_2, "delayed"}), ids=str
)
def test_compiled_layers_give_the_same_in_one_graph(recipe: Any) -> None:
    model = two_layers()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected = passed(model, recipe)
    assert all(map(torch.equal, expected, passed(torch.compile(model, backend=backend), recipe)))
    assert len(graphs) == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("recipe", RECIPES_OF_WEIGHTS, ids=str)
def test_copies_give_the_same(recipe: Any, tmp_path: Path) -> None:
    model = two_layers()
    torch.save(model, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved):
        assert all(map(torch.equal, passed(model, recipe), passed(twin, recipe)))


# --- Training ---------------------------------------------------------------------------------------------------------


def small(fp8_weights: bool) -> nn.Sequential:
    torch.manual_seed(0)
    with fp8_model_init(fp8_weights, preserve_high_precision_init_val=True):
        return nn.Sequential(Linear(64, 128), nn.GELU(), Linear(128, 64))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, closure: bool = False) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))

        def gradients() -> Tensor:
            optimizer.zero_grad()
            with fp8_autocast(fp8_recipe=POWER_2):
                y = model(x)  # noqa: B023
            loss = F.mse_loss(y, x.roll(1, 1))  # noqa: B023
            loss.backward()
            nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 0.1)
            return loss

        loss = optimizer.step(gradients) if closure else gradients()  # type: ignore[arg-type]
        if not closure:
            optimizer.step()
        losses.append(loss.item())  # type: ignore[union-attr]
    return losses


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "for-loop": lambda parameters: torch.optim.AdamW(parameters, 1e-3, foreach=False),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, 1e-3, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, 1e-3, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9, weight_decay=1e-2),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, 1e-1, max_iter=3),
}


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_train_as_float32_weights(name: str, closure: bool) -> None:
    if name == "LBFGS" and not closure:
        pytest.skip("LBFGS needs a closure")
    plain, held = small(False), small(True)
    of_plain, of_held = OPTIMIZERS[name](plain.parameters()), with_master_weights(OPTIMIZERS[name](held.parameters()))
    assert train(plain, of_plain, range(8), closure) == train(held, of_held, range(8), closure)
    for weight, state in ((held[0].weight, of_held.state_dict()["state"][0]),):
        assert torch.equal(state["master_param"], plain[0].weight)
        assert torch.equal(weight.dequantize(), rounded(plain[0].weight.detach()))  # type: ignore[operator]
    assert [id(each) for each in of_held.param_groups[0]["params"]] == [id(each) for each in held.parameters()]


@pytest.mark.parametrize("optimizer_first", [False, True])
def test_training_resumes_to_the_bit(optimizer_first: bool) -> None:
    held = small(True)
    optimizer = with_master_weights(OPTIMIZERS["foreach"](held.parameters()))
    train(held, optimizer, range(4))
    file = io.BytesIO()
    torch.save({"model": held.state_dict(), "optimizer": optimizer.state_dict()}, file)
    straight = train(held, optimizer, range(4, 8))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    torch.manual_seed(9)
    with fp8_model_init():
        other = nn.Sequential(Linear(64, 128), nn.GELU(), Linear(128, 64))
    of_other = with_master_weights(OPTIMIZERS["foreach"](other.parameters()))
    loads = [lambda: other.load_state_dict(saved["model"]), lambda: of_other.load_state_dict(saved["optimizer"])]
    for load in reversed(loads) if optimizer_first else loads:
        load()
    assert train(other, of_other, range(4, 8)) == straight
    plain = small(False)  # goes on without masters
    plain.load_state_dict(saved["model"])
    of_plain = OPTIMIZERS["foreach"](plain.parameters())
    of_plain.load_state_dict(saved["optimizer"])
    train(plain, of_plain, range(4, 5))


def test_masters_follow_weights_that_are_loaded() -> None:
    held, other = small(True), small(False)
    optimizer = with_master_weights(torch.optim.SGD(held.parameters(), 0.0))
    train(held, optimizer, range(2))
    with torch.no_grad():
        other[0].weight.mul_(3)
    held.load_state_dict(other.state_dict())
    train(held, optimizer, range(2))
    assert torch.equal(held[0].weight.dequantize(), rounded(other[0].weight.detach()))


def test_training_without_masters_warns_once_and_loses_updates() -> None:
    held = small(True)
    optimizer = OPTIMIZERS["for-loop"](held.parameters())
    with pytest.warns(UserWarning, match="with_master_weights") as caught:
        alone = train(held, optimizer, range(40))
    assert len([each for each in caught if "with_master_weights" in str(each.message)]) == 1
    other = small(True)
    masters = train(other, with_master_weights(OPTIMIZERS["for-loop"](other.parameters())), range(40))
    assert masters[-1] < alone[-1] - 0.02
    with pytest.raises(RuntimeError, match="before its first step"):
        with_master_weights(optimizer)


class InFP8(Regression):
    def __init__(self, fp8_weights: bool) -> None:
        super().__init__()
        with fp8_model_init(fp8_weights, preserve_high_precision_init_val=True):
            self.net = mlp(Linear)


@pytest.mark.parametrize("recipe", [POWER_2, "delayed"], ids=str)
def test_a_trainer_keeps_masters_by_itself(recipe: Any, tmp_path: Path) -> None:
    def fit(fp8_weights: bool, epochs: int, path: Path | None = None) -> tuple[Any, InFP8]:
        L.seed_everything(1)
        model = InFP8(fp8_weights)
        options = {"max_epochs": epochs, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
        trainer = fp8_trainer(recipe, fp8={"weights_dtype": torch.float32}, **options)
        trainer.fit(model, regression_data(), ckpt_path=path)
        return trainer, model

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*with_master_weights")
        trainer, straight = fit(True, 3)
        assert in_fp8(straight) == ["net.2.weight", "net.4.weight"]
        assert trainer.precision_plugin.summary.num_fp8 == 2
        first, _ = fit(True, 2)
        first.save_checkpoint(tmp_path / "two.ckpt")
        _, resumed = fit(True, 3, tmp_path / "two.ckpt")
    assert resumed.losses == straight.losses[-len(resumed.losses) :]
    _, plain = fit(False, 3)
    if recipe is POWER_2:
        assert straight.losses == plain.losses
    else:
        assert straight.losses[-1] == pytest.approx(plain.losses[-1], rel=0.05)


def test_a_copy_of_an_optimizer_with_masters_is_refused() -> None:
    weight = kept(torch.randn(16, 32))
    optimizer = with_master_weights(torch.optim.AdamW([weight]))
    weight.grad = torch.ones(16, 32)
    optimizer.step()
    _, copied = copy.deepcopy((weight, optimizer))
    with pytest.raises(RuntimeError, match="load the first one's state_dict"):
        with_master_weights(copied)


def test_an_optimizer_steps_the_weights_that_it_holds_now() -> None:
    weight = kept(torch.zeros(16, 32))
    first, second = (with_master_weights(torch.optim.SGD([each], lr=1.0)) for each in (weight, kept(torch.ones(4, 4))))
    weight.grad = torch.ones(16, 32)
    first.step()
    assert torch.equal(weight.dequantize(), torch.full((16, 32), -1.0))
    second.add_param_group({"params": first.param_groups[0]["params"][:]})
    first.param_groups[0]["params"].clear()
    first.step()
    second.step()
    assert torch.equal(weight.dequantize(), torch.full((16, 32), -2.0))
    first.step()
    assert torch.equal(weight.dequantize(), torch.full((16, 32), -2.0))


@pytest.mark.parametrize("change", ["shape", "groups"])
def test_a_state_that_does_not_fit_changes_nothing(change: str) -> None:
    weight = kept(torch.zeros(16, 32))
    optimizer = with_master_weights(torch.optim.SGD([weight], lr=1.0, momentum=0.9))
    weight.grad = torch.ones(16, 32)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["master_param"] = torch.full((32,) if change == "shape" else (16, 32), 7.0)
    if change == "groups":
        state["param_groups"].append({**state["param_groups"][0], "params": [1]})
    with pytest.raises(ValueError):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["params"] == [weight]
    assert torch.equal(weight.dequantize(), torch.full((16, 32), -1.0))


def test_a_master_is_rounded_once() -> None:
    """To FP8, and not to BF16 before: 1 + 2⁻⁴ + 2⁻¹² rounds up to 1.125, and by way of BF16 to even, 1."""
    weight = kept(torch.full((16, 32), 256.0, dtype=torch.bfloat16))
    values = torch.full((16, 32), 1 + 2.0**-4 + 2.0**-12)
    values[0] = 256.0
    with torch.no_grad():
        weight.copy_(values)
    assert torch.equal(weight.dequantize()[1:], torch.full((15, 32), 1.125, dtype=torch.bfloat16))


def kept(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(quantized_tensor(values, TENSOR_CAST))


def optimizers() -> list[Any]:
    def named(name: str, **options: Any) -> Any:
        return functools.partial(getattr(torch.optim, name), **options)

    lbfgs = [named("LBFGS", lr=0.5, max_iter=3), named("LBFGS", max_iter=3, line_search_fn="strong_wolfe")]
    others = [
        named(name, lr=0.01, **options)
        for name, options in (
            ("SGD", {"momentum": 0.9}), ("SGD", {"fused": True}),
            ("Adam", {"foreach": True}), ("Adam", {"fused": True}),
        )
    ]  # fmt: skip
    return [(each, True) for each in (*lbfgs, *others)] + [(each, False) for each in others]


@pytest.mark.parametrize(("make", "by_closure"), optimizers())
def test_a_weight_that_is_frozen_between_steps_follows_its_master(make: Any, by_closure: bool) -> None:
    """Beside float32 weights that are cast in each pass. LBFGS goes on moving a weight that has no gradient."""
    x, target = torch.randn(16, 16), torch.randn(16, 16)

    def train(in_fp8: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        if in_fp8:
            with fp8_model_init(preserve_high_precision_init_val=True):
                convert_module(model, first_last_layers_bf16=False)
            optimizer = with_master_weights(make(model.parameters()))
        else:
            optimizer = make(convert_module(model, first_last_layers_bf16=False).parameters())
        losses: list[float] = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            with fp8_autocast(fp8_recipe=POWER_2):
                loss = F.mse_loss(model(x), target)
            loss.backward()
            losses.append(loss.item())
            return loss

        for step in range(6):
            model[1].weight.requires_grad_(step not in (2, 3))
            if by_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        return losses

    assert train(True) == train(False)


MOVES: list[Callable[[nn.Module], Any]] = [
    lambda model: model.to("cpu"), lambda model: model.to(torch.float16), lambda model: model.half(),
    lambda model: model.float(), lambda model: model.cpu(), lambda model: model.to(torch.zeros(1).half()),
    lambda model: model.type(torch.half),
]  # fmt: skip


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_a_weight_that_a_graph_holds_is_not_moved_and_the_error_says_what_to_do(
    move: Callable[[nn.Module], Any], frozen: bool
) -> None:
    with fp8_model_init():
        model = nn.Sequential(nn.LayerNorm(16), convert_module(mlp()), nn.Linear(4, 4)).bfloat16()
    model[1].requires_grad_(not frozen)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with fp8_autocast(fp8_recipe="tensorwise"):
        loss = model(torch.randn(8, 16, dtype=torch.bfloat16)).sum()
    held = r"Linear.weight is stored in FP8.*Finish the backward pass before this call.*\(del loss\).*repeat the call"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=held):
            move(model)
    after = model.state_dict()
    assert {name: type(each) for name, each in model.named_parameters()}["1.2.weight"] is not Tensor
    for name in ("1.2.weight", "1.2.bias", "1.4.weight", "1.4.bias", "2.weight"):
        assert after[name].dtype is torch.bfloat16, name
        assert torch.equal(after[name], expected[name]), name
    del loss, after
    move(model)
    assert len({parameter.dtype for parameter in model.parameters()}) == 1
    assert in_fp8(model) == ["1.2.weight", "1.4.weight"]


def test_after_the_backward_pass_a_weight_is_moved() -> None:
    with fp8_model_init():
        model = convert_module(mlp())
    with fp8_autocast(fp8_recipe="tensorwise"):
        loss = model(torch.randn(8, 16)).sum()
    loss.backward()
    gradient = model[2].weight.grad.clone()
    model.half()
    assert model[2].weight.dtype is torch.half
    assert torch.equal(model[2].weight.grad, gradient.half())
