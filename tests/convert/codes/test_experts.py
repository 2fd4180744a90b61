"""Experts of FP8 checkpoints: what they compute, keep, give back and refuse."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import conversion_summary, convert_module, fp8_autocast
from lightning_fp8.numerics.formats import holds_codes
from tests.convert.codes.made import bits, copied, experts_with_codes, same_bits, spread
from tests.tiers import thorough

pytest.importorskip("transformers.integrations.moe")

WEIGHTS = ("gate_up_proj", "down_proj")
TOKENS, WIDTH = 40, 256


def convert(layer: Any, **options: Any) -> Any:
    """``layer`` after the conversion of a model that has it."""
    convert_module(nn.ModuleDict({"experts": layer}), first_last_layers_bf16=False, **options)
    return layer


def routed(experts: int = 4, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, two experts for each token, and their weights. The last expert has no token."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, WIDTH, generator=generator).bfloat16().requires_grad_()
    index = torch.rand(tokens, experts - 1, generator=generator).topk(2).indices
    return x, index, torch.rand(tokens, 2, generator=generator).bfloat16()


def passes(layer: Any, recipe: str | None = "blockwise", call: Callable[..., Tensor] | None = None) -> list[Tensor]:
    """y and dx."""
    x, index, weights = routed()
    with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        y = (layer if call is None else call)(x, index, weights)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
        y.backward(dy)
    assert x.grad is not None
    return [y.detach(), x.grad]


def values_of(layer: Any) -> list[Tensor]:
    """Both weights in a state dict's terms, float64."""
    state = layer.state_dict()
    return [
        torch.stack([codes.double() * spread(scale, codes.shape) for codes, scale in zip(*pair)])
        for pair in ((state[name], state[f"{name}_scale_inv"]) for name in WEIGHTS)
    ]


def in_float64(layer: Any) -> list[Tensor]:
    """y and dx of the dequantized codes, token by token."""
    (x, index, weights), (up, down) = routed(), values_of(layer)
    x = x.detach().double().requires_grad_()
    rows = []
    for token, experts, shares in zip(x, index, weights.double()):
        hidden = [(up[expert] @ token).chunk(2) for expert in experts]
        parts = [down[e] @ (nn.functional.silu(gate) * u) for e, (gate, u) in zip(experts, hidden)]
        rows.append(sum(share * part for share, part in zip(shares, parts)))
    y = torch.stack(rows)  # type: ignore[arg-type]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    y.backward(dy.double())
    assert x.grad is not None
    return [y.detach(), x.grad]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


# --- What they compute ------------------------------------------------------------------------------------------------

BOUNDS = {"blockwise": 0.05, "rowwise": 0.07, "mxfp8": 0.07, "tensorwise": 0.1, "delayed": 0.1, None: 0.007}
"""Other recipes than blockwise round the codes again, and those with one scale round gradients to E5M2."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("recipe", BOUNDS)
def test_numbers_are_near_float64_of_the_codes(recipe: str | None, dtype: torch.dtype) -> None:
    layer = convert(experts_with_codes(dtype=dtype))
    expected = in_float64(layer)
    for found, exact in zip(passes(layer, recipe), expected):
        assert 0 < relative(found, exact) < BOUNDS[recipe]
    assert layer.record.fp8 == (recipe is not None)


def test_numbers_are_those_of_layers_with_the_codes_of_one_expert() -> None:
    layer = experts_with_codes()
    state = copied(layer.state_dict())

    def of_expert(name: str, expert: int) -> nn.Linear:
        one = nn.Linear(1, 1, bias=False)
        one.weight = nn.Parameter(state[name][expert], requires_grad=False)
        one.weight_scale_inv = nn.Parameter(state[f"{name}_scale_inv"][expert], requires_grad=False)
        one.out_features, one.in_features = one.weight.shape
        return one

    each = nn.ModuleList(nn.ModuleList(of_expert(name, expert) for name in WEIGHTS) for expert in range(4))
    convert_module(each, first_last_layers_bf16=False)
    convert(layer)
    x, index, weights = routed()
    results = []
    for is_loop in (False, True):
        inputs = x.detach().clone().requires_grad_()
        with fp8_autocast(fp8_recipe="blockwise"):
            y = torch.zeros(TOKENS, WIDTH, dtype=x.dtype)
            if is_loop:
                for expert, (up, down) in enumerate(each):
                    tokens, place = torch.where(index == expert)
                    if len(tokens):
                        gate, rest = up(inputs[tokens]).chunk(2, -1)
                        part = down(nn.functional.silu(gate) * rest) * weights[tokens, place, None]
                        y = y.index_add(0, tokens, part)
            else:
                y = layer(inputs, index, weights)
            y.float().square().sum().backward()
        assert inputs.grad is not None
        results.append((y.detach(), inputs.grad))
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Seen(TorchDispatchMode):
    """The largest tensor of more than one byte a value, and the casts of weights of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.casts = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.casts += "quantize_experts" in str(func)
        plain = [each for each in tree_leaves(results) if type(each) is Tensor and each.itemsize > 1]
        self.largest = max([self.largest, *(each.numel() for each in plain)])
        return results


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_kept_copies_in_inference_mode(recipe: str) -> None:
    """As of the Trainer's validations."""
    layers = [convert(experts_with_codes(), recipe=recipe, cache_fp8_weights=on) for on in (True, False)]
    x, index, weights = routed()
    with torch.inference_mode():
        kept, again, anew = (layer.eval()(x, index, weights) for layer in (layers[0], *layers))
    assert torch.equal(kept, anew)
    assert torch.equal(again, anew)


def test_a_weight_takes_a_byte_and_nothing_makes_it_wider() -> None:
    layer = convert(experts_with_codes())
    held = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
        for weight in layer.parameters()
        for operand in weight.operands
        if operand is not None
        for part in (operand.data, operand.scale_inv)
    }
    assert sum(held.values()) <= 1.05 * sum(each.numel() for each in layer.parameters())
    for recipe, casts in (("blockwise", 0), ("rowwise", 4)):
        with Seen() as seen:
            passes(layer, recipe)
        assert seen.casts == casts
        assert (seen.largest < layer.down_proj.numel()) == (recipe == "blockwise")
    assert not list(layer.buffers())


def test_tokens_of_nobody_are_zeros() -> None:
    """Ids from the number of experts on are those of other ranks."""
    layer = convert(experts_with_codes())
    layer._is_expert_parallel = True
    x, index, weights = routed()
    with fp8_autocast(fp8_recipe="blockwise"):
        y = layer(x, torch.full_like(index, 4), weights)
    y.sum().backward()
    assert not y.any()
    assert x.grad is not None
    assert not x.grad.any()


# --- Kept and given back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_a_state_dict_has_all_bits_and_loads(dtype: torch.dtype) -> None:
    before = copied(experts_with_codes(dtype=dtype).state_dict())
    layer = convert(experts_with_codes(dtype=dtype))
    assert same_bits(layer.state_dict(), before)
    changed = {name: each.flip(0).contiguous() for name, each in before.items()}
    layer.load_state_dict(changed)
    assert same_bits(layer.state_dict(), changed)
    assert layer.down_proj.operands.rowwise.scale_inv.shape == (4, 2, 1)
    with pytest.raises(RuntimeError, match=r"down_proj and down_proj_scale_inv are .* in the model.*dequantize=True"):
        layer.load_state_dict({**changed, "down_proj": torch.zeros(4, 256, 128)})
    assert same_bits(layer.state_dict(), changed)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_compute_the_same(copy_of: Callable[[Any], Any]) -> None:
    layer = convert(experts_with_codes())
    other = copy_of(layer)
    assert same_bits(other.state_dict(), layer.state_dict())
    assert other.down_proj.operands.rowwise.data.data_ptr() != layer.down_proj.operands.rowwise.data.data_ptr()
    for found, expected in zip(passes(other), passes(layer)):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
def test_checkpointed_passes_are_equal(recipe: str) -> None:
    layer = convert(experts_with_codes())
    expected = passes(layer, recipe)
    found = passes(layer, recipe, lambda *args: checkpoint(layer, *args, use_reentrant=False))
    assert all(map(torch.equal, found, expected))


@thorough
def test_compiled_code_multiplies_the_codes() -> None:
    torch.compiler.reset()
    layer = convert(experts_with_codes())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, passes(layer, call=compiled), passes(layer)))


def test_moved_and_cast_layers_keep_the_codes() -> None:
    layer = convert(experts_with_codes())
    before = copied(layer.state_dict())
    layer.to(torch.bfloat16)
    assert layer.down_proj.dtype == torch.bfloat16
    assert same_bits(layer.state_dict(), before)
    layer.to("meta").to_empty(device="cpu").load_state_dict(before)
    assert same_bits(layer.state_dict(), before)


def test_written_values_are_cast_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fp8.weights.fp8_tensor._said", {})
    layer = convert(experts_with_codes())
    expected = 2 * values_of(layer)[1]
    with pytest.warns(UserWarning, match="cast again"), torch.no_grad():
        layer.down_proj.mul_(2)
    assert relative(values_of(layer)[1], expected) < 0.035


def test_codes_are_not_trained() -> None:
    layer = convert(experts_with_codes())
    with pytest.raises(RuntimeError, match="codes are those of a checkpoint are frozen"):
        layer.requires_grad_(True)


# --- The table, and what is refused -----------------------------------------------------------------------------------


def test_the_table_says_which_recipe_multiplies_the_codes() -> None:
    model = nn.ModuleDict({"experts": experts_with_codes()})
    rows = conversion_summary(convert_module(model, first_last_layers_bf16=False)).layers
    assert [(row.name, row.shape, row.fp8) for row in rows] == [
        ("experts.gate_up_proj", (4, 256, 256), True),
        ("experts.down_proj", (4, 256, 128), True),
    ]
    assert all("multiplied as they are with recipe='blockwise'; else cast again" in row.reason for row in rows)
    again = convert_module(model, first_last_layers_bf16=False)
    assert [*rows] == [*conversion_summary(again).layers]


def _static() -> Any:
    return experts_with_codes(activation_scheme="static")


def _smaller_blocks() -> Any:
    layer = experts_with_codes()
    layer.block_size = (64, 64)
    return layer


def _a_scale_for_each_half() -> Any:
    """transformers has a block of scales for the gate and one for the other half, of a block's rows in sum."""
    layer = experts_with_codes(hidden=32)
    layer.gate_up_proj_scale_inv = nn.Parameter(torch.ones(4, 2, 2))
    return layer


def _one_scale_for_each() -> Any:
    layer = experts_with_codes()
    layer.block_size = None
    for name in WEIGHTS:
        setattr(layer, f"{name}_scale_inv", nn.Parameter(torch.ones(4, 1, 1)))
    return layer


def _without_scales() -> Any:
    layer = experts_with_codes()
    del layer.down_proj_scale_inv
    return layer


def _in_e5m2() -> Any:
    layer = experts_with_codes()
    layer.down_proj = nn.Parameter(layer.down_proj.float().to(torch.float8_e5m2), requires_grad=False)
    return layer


def _one_in_bf16() -> Any:
    layer = experts_with_codes()
    layer.down_proj = nn.Parameter(layer.down_proj.bfloat16())
    return layer


REFUSED: dict[str, Callable[[], Any]] = {
    "inputs have a constant scale": _static,
    r"gate_up_proj_scale_inv of shape \(4, 2, 2\) and block_size \(64, 64\)": _smaller_blocks,
    r"gate_up_proj_scale_inv of shape \(4, 2, 2\) and block_size \(128, 128\)": _a_scale_for_each_half,
    r"gate_up_proj_scale_inv of shape \(4, 1, 1\) and block_size None": _one_scale_for_each,
    "nothing for down_proj_scale_inv or down_proj_scale of": _without_scales,
    "only unsharded parameters of torch.float8_e4m3fn": _in_e5m2,
    "FP8Experts is neither nn.Linear nor FP8Linear with one float8 weight, nor FP8Experts with two": _one_in_bf16,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_multiplied_is_refused_before_anything_changes(reason: str) -> None:
    model = nn.ModuleDict({"experts": REFUSED[reason](), "other": experts_with_codes()})
    types, before = [type(each) for each in model.values()], copied(model.state_dict())
    with pytest.raises(TypeError, match=rf"^experts\.gate_up_proj of ModuleDict.*{reason}.*skip=\('experts',\)"):
        convert_module(model)
    assert types == [type(each) for each in model.values()]
    assert same_bits(model.state_dict(), before)
    convert_module(model, skip=["experts"], first_last_layers_bf16=False)
    assert type(model["experts"]) is types[0]
    assert not holds_codes(model["other"].down_proj)


@pytest.mark.filterwarnings("ignore:no layer of the model runs in FP8")
def test_packed_fp4_is_named_in_the_table() -> None:
    layer = experts_with_codes()
    for name in WEIGHTS:
        packed = torch.zeros(4, 256, 64, dtype=torch.int8)
        setattr(layer, name, nn.Parameter(packed, requires_grad=False))
    rows = conversion_summary(convert_module(nn.ModuleDict({"experts": layer}))).layers
    assert [(row.fp8, row.reason) for row in rows] == [(False, "its weight is torch.int8")] * 2
    assert torch.equal(bits(layer.down_proj), torch.zeros(4 * 256 * 64, dtype=torch.uint8))
