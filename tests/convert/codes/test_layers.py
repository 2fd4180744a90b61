"""Layers of FP8 checkpoints: what they compute, keep, give back and refuse."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fp8 import (
    FP8FabricPrecision,
    Linear,
    conversion_summary,
    convert_module,
    export_te_state_dict,
    fp8_autocast,
    fp8_model_init,
    onnx_export,
    with_master_weights,
)
from lightning_fp8.torchao.float8 import convert_to_float8_training
from lightning_fp8.weights import fp8_tensor
from lightning_fp8.weights.fp8_tensor import FP8Tensor
from tests.convert.codes.made import bits, chain, coded, copied, hold_codes, same_bits, values_of
from tests.tiers import every_row, thorough

KINDS = ["one", "rows", "blocks"]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e8m0fnu]
FITTING = {"one": "tensorwise", "rows": "rowwise", "blocks": "blockwise"}


def single(kind: str, dtype: torch.dtype = torch.float32, bias: bool = True, **named: str) -> nn.Sequential:
    """One layer of 200 × 272, whose last blocks are not whole."""
    torch.manual_seed(0)
    return nn.Sequential(hold_codes(nn.Linear(272, 200, bias, dtype=torch.bfloat16), kind, dtype, **named))


def convert(model: nn.Module, **options: Any) -> nn.Module:
    return convert_module(model, **{"first_last_layers_bf16": False, **options})


def cast(x: Tensor, recipe: str, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """The values of ``x [R, K]`` after the recipe's cast of an input or a gradient, float64."""
    values = x.double()
    if recipe == "blockwise":
        padded = torch.zeros(len(x), -(-x.shape[1] // 128) * 128, dtype=torch.float64)
        padded[:, : x.shape[1]] = values
        amax = padded.reshape(len(x), -1, 128).abs().amax(2).repeat_interleave(128, 1)[:, : x.shape[1]]
    else:
        amax = values.abs().amax(1, keepdim=True) if recipe == "rowwise" else values.abs().amax()
    scale = (float(torch.finfo(dtype).max) / amax).float()
    scale = scale.double() if recipe == "tensorwise" else scale.double().log2().floor().exp2()
    return (values * scale).float().to(dtype).double() / scale


def error(actual: Tensor, expected: Tensor) -> float:
    expected = expected.detach()
    return float((actual.detach().double() - expected).norm() / expected.norm())


# --- Numerics ---------------------------------------------------------------------------------------------------------


@every_row
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_codes(kind: str, dtype: torch.dtype) -> None:
    """Against float64: only inputs and gradients are rounded to FP8, and the result to BF16."""
    model, recipe = single(kind, dtype), FITTING[kind]
    weight, bias = values_of(model[0]), model[0].bias.double()
    convert(model)
    x = torch.randn(48, 272, dtype=torch.bfloat16, requires_grad=True)
    with fp8_autocast(fp8_recipe=recipe):
        y = model(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert error(y, cast(x.detach(), recipe) @ weight.t() + bias) < 2.5e-3
    assert x.grad is not None
    gradient = cast(dy, recipe, torch.float8_e5m2 if recipe == "tensorwise" else torch.float8_e4m3fn)
    assert error(x.grad, gradient @ weight) < (0.04 if kind == "rows" else 2.5e-3)  # rows are cast again along columns


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_recipes_cast_the_codes_again(kind: str, recipe: str) -> None:
    model = single(kind)
    weight, before = values_of(model[0]), copied(model.state_dict())
    convert(model)
    x = torch.randn(48, 272, dtype=torch.bfloat16, requires_grad=True)
    with fp8_autocast(fp8_recipe=recipe):
        y = model(x)
    y.backward(torch.ones_like(y))
    assert error(y - model[0].bias, x.detach().double() @ weight.t()) < 0.06
    assert x.grad is not None
    assert error(x.grad, torch.ones_like(y).double() @ weight) < 0.06
    assert same_bits(model.state_dict(), before)


@pytest.mark.parametrize("kind", KINDS)
def test_outside_fp8_they_multiply_the_dequantized_weight(kind: str) -> None:
    model, x = single(kind), torch.randn(8, 272, dtype=torch.bfloat16)
    expected = nn.functional.linear(x, values_of(model[0]).bfloat16(), model[0].bias)
    assert torch.equal(convert(model)(x), expected)


class Wide(TorchDispatchMode):
    """Notes results in high precision that are as large as a weight."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shapes, self.found = (shape, shape[::-1]), list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(results):
            if isinstance(each, Tensor) and each.itemsize > 1 and tuple(each.shape) in self.shapes:
                self.found.append(str(func))
        return results


@pytest.mark.parametrize(("kind", "recipe"), [("blocks", "blockwise"), ("one", "tensorwise"), ("one", "delayed")])
def test_no_weight_in_high_precision_is_made(kind: str, recipe: str) -> None:
    model, x = convert(single(kind)), torch.randn(16, 272, dtype=torch.bfloat16, requires_grad=True)
    with Wide((200, 272)) as made, fp8_autocast(fp8_recipe=recipe):
        y = model(x)
    with made:
        y.backward(torch.ones_like(y))
    assert not made.found
    with made:
        model(x)
    assert made.found  # in high precision there is one


def test_a_base_weight_takes_a_byte_per_parameter() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(hold_codes(nn.Linear(512, 384, bias=False), "blocks"))
    codes = model[0].weight.data_ptr()
    weight = convert(model)[0].weight
    parts = [each for operand in weight.operands if operand is not None for each in (operand.data, operand.scale_inv)]
    assert sum(each.numel() * each.itemsize for each in parts) / weight.numel() <= 1.05
    assert parts[0].data_ptr() == codes  # not even a copy while converting
    assert len([*model.parameters()]) == 1
    assert not [*model.buffers()]


# --- Bits -------------------------------------------------------------------------------------------------------------


@every_row
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_gives_codes_and_scales_back(kind: str, dtype: torch.dtype) -> None:
    for name in ("weight_scale_inv", "weight_scale"):
        model = single(kind, dtype, name=name)
        before = copied(model.state_dict())
        convert(model)
        assert same_bits(model.state_dict(), before)
        other = convert(single(kind, dtype, name=name).apply(_zeroed))
        assert not same_bits(other.state_dict(), before)
        other.load_state_dict(before)
        assert same_bits(other.state_dict(), before)


def _zeroed(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        bits(module.weight).zero_()


def test_all_scales_of_e8m0_survive() -> None:
    layer = nn.Linear(16, 256, bias=False)
    codes, _ = coded(layer.weight, "rows")
    layer.weight = nn.Parameter(codes, requires_grad=False)
    layer.weight_scale = nn.Parameter(
        torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).reshape(256, 1), requires_grad=False
    )
    model = nn.Sequential(layer)
    before = copied(model.state_dict())
    with pytest.warns(UserWarning, match="narrow"):
        convert(model)
    assert same_bits(model.state_dict(), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_merge_is_cast_again_and_saved_exactly(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, and what is saved is what the layer multiplies."""
    monkeypatch.setattr(fp8_tensor, "_said", {})
    model, change = convert(single("blocks", dtype)), torch.randn(200, 272, dtype=torch.bfloat16) / 50
    expected = values_of(model[0]) + change.double()
    with pytest.warns(UserWarning, match=r"merging an adapter.*FineGrainedFP8Config\(dequantize=True\)"):
        model[0].weight.data += change
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model[0].weight.data += torch.zeros_like(change)
    assert error(model[0].weight.dequantize(), expected) < 0.04
    assert torch.equal(values_of(model[0]).bfloat16(), model[0].weight.dequantize())


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": lambda model: _saved(model),
    "half": lambda model: model.half(),
    "float": lambda model: model.float(),
    "to": lambda model: model.to(torch.bfloat16),
    "cpu": lambda model: model.to("cpu"),
    "twice": lambda model: convert_module(model),
    "unskipped": lambda model: convert_module(convert_module(model, skip=["1"])),
    "no layers": lambda model: convert_module(model, replace_layers=False),
    "in fp8_model_init": fp8_model_init()(lambda model: convert_module(model, skip=["1"])),
    "plugin": lambda model: FP8FabricPrecision(weights_dtype="fp16").convert_module(model),
}


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.filterwarnings("ignore:no layer of the model runs in FP8")
@pytest.mark.parametrize("how", COPIES)
def test_what_is_done_to_a_model_keeps_the_codes(how: str) -> None:
    model = chain()
    before = {name: each for name, each in copied(model.state_dict()).items() if name[0] in "12" and "weight" in name}
    with warnings.catch_warnings():
        warnings.simplefilter("error", append=True)
        made = COPIES[how](convert_module(model))
    after = {name: each for name, each in made.state_dict().items() if name in before}
    assert same_bits(after, before)
    weight = made[1].weight
    assert type(weight) is FP8Tensor
    assert weight.stored is not None
    assert not weight.requires_grad
    assert weight.dtype == {"half": torch.float16, "plugin": torch.float16, "float": torch.float32}.get(
        how, torch.bfloat16
    )


@pytest.mark.parametrize("assign", [False, True])
def test_meta_models_load_codes(assign: bool) -> None:
    before = copied(chain().state_dict())
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(128, 128, dtype=torch.bfloat16) for _ in range(4)))
        for layer in model[1:3]:
            layer.weight = nn.Parameter(torch.empty(128, 128, dtype=torch.float8_e4m3fn), requires_grad=False)
            layer.weight_scale_inv = nn.Parameter(torch.empty(1, 1))
    convert_module(model)
    assert model[1].weight.is_meta
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(before, assign=assign)
    assert same_bits(model.state_dict(), before)
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    with fp8_autocast(fp8_recipe="blockwise"):
        expected = convert_module(chain())(x)
        assert torch.equal(model(x), expected)


def test_cached_copies_follow_a_loaded_state_dict() -> None:
    model, other = convert(single("blocks")), convert(single("blocks").apply(_zeroed))
    x = torch.randn(4, 272, dtype=torch.bfloat16)
    with fp8_autocast(fp8_recipe="rowwise"):
        other[0](x, is_first_microbatch=True)
        other.load_state_dict(model.state_dict())
        assert torch.equal(other[0](x, is_first_microbatch=False), model(x))


@pytest.mark.parametrize(
    "change",
    ["values", "no scales", "other scales without codes", "scales of rows", "scales in BF16", "codes of another shape"],
)
def test_state_dicts_that_do_not_fit_are_refused(change: str) -> None:
    model = convert(single("blocks"))
    before = copied(model.state_dict())
    state = {**before}
    if change == "values":
        state["0.weight"] = torch.randn(200, 272, dtype=torch.bfloat16)
    elif change == "no scales":
        del state["0.weight_scale_inv"]
    elif change == "other scales without codes":
        state = {"0.weight_scale_inv": 2 * state["0.weight_scale_inv"], "0.bias": state["0.bias"]}
    elif change.startswith("codes"):
        state["0.weight"] = state["0.weight"][:100]
    else:
        scale = state["0.weight_scale_inv"]
        state["0.weight_scale_inv"] = scale.bfloat16() if "BF16" in change else torch.ones(200, 1)
    with pytest.raises(RuntimeError, match=r"0\.weight and weight_scale_inv are .* in the model.*dequantize=True"):
        model.load_state_dict(state)
    assert torch.equal(bits(model[0].weight.operands.rowwise.data), bits(before["0.weight"]))
    assert model.load_state_dict({}, strict=False).missing_keys == ["0.weight", "0.bias"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_without_frozen_parameters_loads_into_its_model(kind: str, dtype: torch.dtype) -> None:
    """Scales are no parameters, so those who drop frozen parameters by name keep them."""
    model = convert(single(kind, dtype))
    before = copied(model.state_dict())
    frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    trained = {name: each for name, each in before.items() if name not in frozen}
    assert [*trained] == ["0.bias", "0.weight_scale_inv"]
    trained["0.bias"] = trained["0.bias"] + 1
    result = model.load_state_dict(trained, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["0.weight"], [])
    assert same_bits(model.state_dict(), {**before, "0.bias": trained["0.bias"]})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0\.weight"'):
        model.load_state_dict(trained)


@torch.no_grad()
def test_codes_are_not_taken_for_values() -> None:
    """In a loop over ``named_parameters`` that copies what ``state_dict`` gave."""
    model, before = convert(single("blocks")), copied(single("blocks").state_dict())
    with pytest.raises(TypeError, match="without their scales.*load both with load_state_dict"):
        model[0].weight.copy_(before["0.weight"])
    with pytest.raises(TypeError, match="without their scales"):
        model[0].weight.data = before["0.weight"]
    assert same_bits(model.state_dict(), before)


def test_codes_of_nan_stay_if_their_values_are_written() -> None:
    """As DistributedDataParallel writes those of the first rank."""
    model = single("blocks")
    bits(model[0].weight)[[3, 7]] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)
    before = copied(model.state_dict())
    weight = convert(model)[0].weight
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        weight.copy_(weight.dequantize())
    assert same_bits(model.state_dict(), before)
    assert values_of(model[0]).isnan().sum() == 2


@thorough
def test_compiled_code_multiplies_the_codes() -> None:
    torch.compiler.reset()
    model, x = convert(chain(depth=3)), torch.randn(8, 128, dtype=torch.bfloat16)
    with fp8_autocast(fp8_recipe="blockwise"):
        expected = model(x)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(compiled, expected)
    gradients = [torch.autograd.grad(y.float().square().sum(), model[0].weight)[0] for y in (expected, compiled)]
    assert torch.equal(*gradients)


# --- Frozen -----------------------------------------------------------------------------------------------------------

FROZEN = r"codes are those of a checkpoint are frozen.*LoRA.*FineGrainedFP8Config\(dequantize=True\)"


@pytest.mark.parametrize("with_masters", [False, True])
def test_codes_are_not_trained(with_masters: bool) -> None:
    model = convert_module(chain())
    before = copied(model.state_dict())
    with pytest.raises(RuntimeError, match=FROZEN):
        model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    optimizer = with_master_weights(optimizer) if with_masters else optimizer
    x = torch.randn(8, 128, dtype=torch.bfloat16)

    def backward() -> None:
        with fp8_autocast(fp8_recipe="blockwise"):
            model(x).sum().backward()

    backward()
    optimizer.step()  # of all parameters; the frozen ones have no state, and no masters
    assert sum(isinstance(each, FP8Tensor) for each in optimizer.state) == 0
    assert sum(each.numel() for each in optimizer.state[model[0].weight].values()) == 2 * 128 * 128 + 1
    after = model.state_dict()
    codes = [name for name in before if name[0] in "12" and "weight" in name]
    assert same_bits({name: after[name] for name in codes}, {name: before[name] for name in codes})
    assert not torch.equal(after["1.bias"], before["1.bias"])
    for each in model.parameters():
        each.requires_grad = True
    backward()
    with pytest.raises(RuntimeError, match=FROZEN):
        optimizer.step()


def test_tied_codes_stay_one_memory() -> None:
    model = chain()
    model[2].weight, model[2].weight_scale_inv = model[1].weight, model[1].weight_scale_inv
    convert_module(model)
    (one, _), (other, _) = model[1].weight.operands, model[2].weight.operands
    assert one.data.data_ptr() == other.data.data_ptr()
    assert one.scale_inv.data_ptr() == other.scale_inv.data_ptr()


# --- The table, and what is left --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_says_which_recipe_multiplies_the_codes(kind: str) -> None:
    model = convert_module(chain(kind), first_last_layers_bf16=True, num_layers_at_start_in_bf16=2)
    rows = {row.name: row for row in conversion_summary(model).layers}
    assert [row.fp8 for row in rows.values()] == [False, False, True, False]
    assert rows["1"].reason == "in layer 1 of 4, one of the first 2; its FP8 codes are dequantized in each pass"
    assert f"multiplied as they are with recipe={FITTING[kind]!r}" in rows["2"].reason
    assert rows["2"].reason.endswith("else cast again")
    assert "codes" not in rows["0"].reason + rows["3"].reason
    again = convert_module(model, num_layers_at_start_in_bf16=2)
    assert [*rows.values()] == [*conversion_summary(again).layers]


def test_scales_of_several_blocks_are_no_rows_of_the_table() -> None:
    class FP8Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down_proj = nn.Parameter(torch.zeros(2, 256, 256).to(torch.float8_e4m3fn), requires_grad=False)
            self.down_proj_scale_inv = nn.Parameter(torch.ones(2, 2, 2))

    model = chain(features=256)
    model.experts = FP8Experts()
    convert(model, recipe="blockwise", skip=("experts",))
    names = ["0", "1", "2", "3", "experts.down_proj"]
    assert [row.name for row in conversion_summary(model).layers] == names
    optimizer = torch.optim.SGD([model[0].weight, model[3].weight], 0.1)
    model[:4](torch.randn(16, 256, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    after = conversion_summary(model)
    assert [row.name for row in after.layers] == names
    assert "4 of 4 linear layers and 0 of 1 weights of experts ran in FP8" in str(after)


@pytest.mark.filterwarnings("ignore:no layer of the model runs in FP8")
@pytest.mark.parametrize("options", [{"skip": ["1", "2"]}, {"replace_layers": False}])
def test_layers_that_are_skipped_stay_as_they_are(options: dict[str, Any]) -> None:
    model = chain()
    before = copied(model.state_dict())
    convert_module(model, **options)
    assert type(model[1]) is nn.Linear
    assert model[1].weight.dtype == torch.float8_e4m3fn
    assert same_bits(model.state_dict(), before)
    (reason,) = [row.reason for row in conversion_summary(model).layers if row.name == "1"]
    assert next(iter(options)) in reason


def test_torchaos_function_takes_codes() -> None:
    model, x = chain(), torch.randn(4, 128, dtype=torch.bfloat16)
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "2")
    assert isinstance(model[1], Linear)
    assert type(model[2]) is nn.Linear
    assert model[0:2](x).dtype == torch.bfloat16
    assert model[1].record.fp8 == 1


class Other(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def _other_class(layer: Any) -> None:
    layer.__class__ = Other


def _blocks_of_64(layer: Any) -> None:
    layer.block_size, layer.weight_scale_inv = (64, 64), nn.Parameter(torch.ones(2, 2))


def _static(layer: Any) -> None:
    layer.activation_scale = nn.Parameter(torch.ones(()))


def _in_e5m2(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.float().to(torch.float8_e5m2), requires_grad=False)


def _scales_in_fp16(layer: Any) -> None:
    layer.weight_scale_inv = nn.Parameter(layer.weight_scale_inv.half())


def _groups_of_columns(layer: Any) -> None:
    layer.weight_scale_inv = nn.Parameter(torch.ones(128, 2))


def _without_scales(layer: Any) -> None:
    del layer.weight_scale_inv


REFUSED: dict[str, Callable[[Any], None]] = {
    "Other is neither nn.Linear nor FP8Linear": _other_class,
    r"weight_scale_inv of shape \(2, 2\) and block_size \(64, 64\)": _blocks_of_64,
    "inputs have a constant scale": _static,
    "only unsharded parameters of torch.float8_e4m3fn": _in_e5m2,
    "weight_scale_inv of torch.float16 for": _scales_in_fp16,
    r"weight_scale_inv of shape \(128, 2\)": _groups_of_columns,
    "nothing for weight_scale_inv or weight_scale": _without_scales,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_multiplied_is_refused_before_anything_changes(reason: str) -> None:
    model = chain()
    REFUSED[reason](model[2])
    types = [type(each) for each in model]
    with pytest.raises(TypeError, match=rf"^2\.weight of Sequential.*{reason}.*dequantize=True\).*skip=\('2',\)"):
        convert_module(model)
    assert types == [type(each) for each in model]
    convert_module(model, skip=["2"])
    assert type(model[2]) is types[2]
    assert isinstance(model[1], Linear)


def test_codes_that_accelerate_offloads_are_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(chain(), execution_device="cpu")
    with pytest.raises(TypeError, match=r"^1\.weight of Sequential.*load the model without offloading"):
        convert_module(model)
    assert [type(each) for each in model] == [nn.Linear] * 4


def test_layers_of_compressed_tensors_are_refused_with_their_config() -> None:
    of_transformers = pytest.importorskip("transformers.integrations.compressed_tensors")
    if not hasattr(of_transformers, "CompressedTensorsFP8Linear"):
        pytest.skip("this version of transformers has no such layer")
    model = nn.Sequential(nn.Linear(16, 16), of_transformers.CompressedTensorsFP8Linear(16, 16))
    with pytest.raises(TypeError, match=r"^1\.weight.*quantization_config=CompressedTensorsConfig\(dequantize=True\)"):
        convert_module(model)


def test_the_bias_decides_the_dtype_and_keeps_its_own() -> None:
    model = chain()
    model[1].bias = nn.Parameter(torch.zeros(128))
    model[2].bias = None
    convert_module(model)
    assert model[1].bias.dtype == model[1].weight.dtype == torch.float32
    assert model[2].weight.dtype == torch.bfloat16


def test_transformer_engine_has_no_key_for_codes() -> None:
    with pytest.raises(ValueError, match=r"1\.weight is FP8 codes.*dequantize=True"):
        export_te_state_dict(convert_module(chain()), "2.4.0")


@thorough
def test_exported_programs_have_the_codes() -> None:
    model, x = convert_module(chain("one")).eval(), torch.randn(8, 128, dtype=torch.bfloat16)
    with fp8_autocast(fp8_recipe="tensorwise"), onnx_export():
        program = torch.export.export(model, (x,))
        assert torch.equal(program.module()(x), model(x))
