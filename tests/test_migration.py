"""Names of other projects' FP8 here: what works under them, and what is said of the others."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache, partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision.transformer_engine import TransformerEnginePrecision
from torch import Tensor, nn

import lightning_fp8
import lightning_fp8.torchao.float8 as ao
import lightning_fp8.transformer_engine.pytorch as te
from lightning_fp8.fp8_region import current_context
from lightning_fp8.torchao import answers as ao_answers
from lightning_fp8.transformer_engine import answers
from lightning_fp8.transformer_engine.common import recipe as te_recipe

# --- autocast ---------------------------------------------------------------------------------------------------------


def _output(region: object) -> Tensor:
    torch.manual_seed(0)
    layer = lightning_fp8.Linear(32, 16)
    with region:  # type: ignore[attr-defined]
        return layer(torch.randn(4, 32))  # type: ignore[no-any-return]


def test_autocast_is_fp8_autocast_with_the_newer_names_of_its_arguments() -> None:
    former = _output(lightning_fp8.fp8_autocast(enabled=True, fp8_recipe="rowwise", fp8_group=None))
    newer = _output(lightning_fp8.autocast(enabled=True, recipe="rowwise", amax_reduction_group=None))
    high_precision = _output(lightning_fp8.autocast(enabled=False))
    assert torch.equal(former, newer)
    assert not torch.equal(newer, high_precision)


def test_autocast_decorates_a_function() -> None:
    @lightning_fp8.autocast(enabled=False, calibrating=True, recipe="mxfp8")
    def recipe_inside() -> str:
        return current_context().recipe.name

    assert recipe_inside() == "mxfp8"
    assert not current_context().enabled


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"enabled": "rowwise"}, r"a recipe is autocast\(recipe='rowwise'\)"),
        ({"enabled": print}, r"write @autocast\(\)"),
        ({"amax_reduction_group": 3}, "amax_reduction_group=3 must be a torch.distributed.ProcessGroup"),
        ({"recipe": "float8"}, "recipe 'float8' is unknown"),
    ],
)
def test_autocast_names_its_own_arguments_in_errors(arguments: dict[str, object], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        lightning_fp8.autocast(**arguments)  # type: ignore[arg-type]


# --- Transformer Engine's import paths --------------------------------------------------------------------------------


def _names(text: str) -> list[str]:
    return text.split()


TE_PYTORCH = _names("""
constants DType LayerNormLinear Linear LayerNormMLP LayerNorm RMSNorm GroupedLinear Fp8Padding Fp8Unpadding
initialize_ub destroy_ub UserBufferQuantizationMode DotProductAttention FusedMLAQUpProjRopeQuant
MultiheadAttention InferenceParams RotaryPositionEmbedding TransformerLayer moe_permute moe_permute_with_probs
moe_permute_and_pad_with_probs moe_unpermute moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs
fp8_autocast fp8_model_init autocast quantized_model_init is_fp8_available is_mxfp8_available
is_fp8_block_scaling_available is_nvfp4_available get_default_recipe QuantizerRole QuantizerRequest
DelayedScalingRequest get_cudnn_version get_device_compute_capability is_bf16_available deinterleave_glu_tensor
interleave_glu_tensor make_graphed_callables checkpoint CudaRNGStatesTracker get_cpu_offload_context
mark_not_offload ManualOffloadSynchronizer ops optimizers onnx_export parallel_cross_entropy CusolverMpCtx
newton_schulz QuantizedTensorStorage QuantizedTensor Quantizer prepare_for_saving restore_from_saved
restore_from_func_ctx Float8Quantizer Float8CurrentScalingQuantizer MXFP8Quantizer Float8BlockQuantizer
NVFP4Quantizer Float8TensorStorage MXFP8TensorStorage Float8BlockwiseQTensorStorage NVFP4TensorStorage
Float8Tensor MXFP8Tensor Float8BlockwiseQTensor NVFP4Tensor HybridQuantizer HybridQuantizedTensorStorage
IdentityQuantizer IdentityTensorStorage HybridQuantizedTensor IdentityTensor attention distributed export fp8
module quantization transformer tensor float8_tensor permutation cross_entropy cpu_offload graph jit router
utils cpp_extensions _extra_state cpu_offload_v1 custom_recipes distributed_weight dynamo ep numerics_debug
onnx_extensions quantized_tensor torch_version triton
""")
"""The names of ``transformer_engine.pytorch`` 2.20, and those of its modules that others import from."""

TE_RECIPE = _names("""
Format MMParams QParams Recipe DelayedScaling Float8CurrentScaling MXFP8BlockScaling Float8BlockScaling
NVFP4BlockScaling CustomRecipe
""")

TE_ELSEWHERE = {
    "fp8": "FP8GlobalStateManager RecipeState fp8_autocast fp8_model_init DelayedScaling Recipe get_fp8_max "
    "check_fp8_support check_mxfp8_support get_default_fp8_recipe NVFP4BlockScaling CustomRecipe split_and_copy",
    "quantization": "FP8GlobalStateManager autocast get_align_size_for_quantization check_recipe_support QuantizerRole "
    "DelayedScalingRecipeState _amax_and_scale_update",
    "module.base": "TransformerEngineBaseModule initialize_ub get_workspace get_dummy_wgrad",
    "module.fp8_padding": "Fp8Padding",
    "module.grouped_linear": "GroupedLinear",
    "module.layernorm": "LayerNorm",
    "module.layernorm_linear": "LayerNormLinear _LayerNormLinear",
    "module.layernorm_mlp": "LayerNormMLP _LayerNormMLP",
    "module.linear": "Linear _Linear",
    "module.rmsnorm": "RMSNorm",
    "attention.inference": "InferenceParams PagedKVCacheManager",
    "attention.multi_head_attention": "MultiheadAttention",
    "attention.dot_product_attention": "DotProductAttention _attention_backends utils backends",
    "attention.dot_product_attention.dot_product_attention": "DotProductAttention",
    "attention.dot_product_attention.utils": "FlashAttentionUtils AttentionLogging",
    "attention.dot_product_attention.context_parallel": "get_batch_on_this_cp_rank",
    "attention.dot_product_attention.softmax": "FusedScaleMaskSoftmax",
    "cpp_extensions.gemm": "general_gemm",
    "ops.basic.rmsnorm": "RMSNorm",
    "optimizers.fused_adam": "FusedAdam",
    "tensor.float8_tensor": "Float8Tensor Float8Quantizer",
    "tensor.storage.mxfp8_tensor_storage": "MXFP8TensorStorage",
    "module": "Linear LayerNormLinear LayerNormMLP LayerNorm RMSNorm GroupedLinear Fp8Padding initialize_ub",
    "attention": "DotProductAttention MultiheadAttention InferenceParams RotaryPositionEmbedding apply_rotary_pos_emb",
    "attention.rope": "apply_rotary_pos_emb RotaryPositionEmbedding apply_fused_qkv_rotary_pos_emb",
    "distributed": "checkpoint CudaRNGStatesTracker activation_recompute_forward gather_split_1d_tensor "
    "gather_along_first_dim prepare_te_modules_for_fsdp",
    "export": "onnx_export te_translation_table is_in_onnx_export_mode",
    "transformer": "TransformerLayer DropPath",
    "optimizers": "FusedAdam FusedSGD",
    "tensor": "QuantizedTensor Float8Tensor",
    "float8_tensor": "Float8Tensor",
    "ops": "Sequential Linear",
}
"""By module of ``transformer_engine.pytorch``, names that others import."""

TE = [
    *(("lightning_fp8.transformer_engine.pytorch", name) for name in TE_PYTORCH),
    *(("lightning_fp8.transformer_engine.common.recipe", name) for name in TE_RECIPE),
    *(
        (f"lightning_fp8.transformer_engine.pytorch.{at}", name)
        for at, of in TE_ELSEWHERE.items()
        for name in of.split()
    ),
]


def _imported(module: str, name: str) -> Any:
    """What ``from module import name`` gives."""
    names: dict[str, Any] = {}
    exec(f"from {module} import {name}", names)
    return names[name]


@pytest.mark.parametrize(("module", "name"), TE, ids=[f"{module.split('.', 2)[2]}.{name}" for module, name in TE])
def test_a_name_of_transformer_engine_is_here_or_answered(module: str, name: str) -> None:
    """An import gives the sentence as an ImportError, and ``hasattr`` is False."""
    home = importlib.import_module(module)
    if hasattr(home, name):
        assert _imported(module, name) is getattr(home, name)
        return
    with pytest.raises(ImportError, match=rf"^{name} is not supported: \w.*\w") as imported:
        _imported(module, name)
    with pytest.raises(AttributeError, match=rf"^{re.escape(str(imported.value))}$"):
        getattr(home, name)


def test_what_exists_is_what_lightning_fp8_has_by_that_name() -> None:
    same = [name for name in TE_PYTORCH if name in lightning_fp8.__all__]
    assert len(same) == 15
    assert all(getattr(te, name) is getattr(lightning_fp8, name) for name in same)
    recipes = [name for name in TE_RECIPE if name in lightning_fp8.__all__]
    assert all(getattr(te_recipe, name) is getattr(lightning_fp8, name) for name in recipes)
    assert te.quantized_model_init is lightning_fp8.fp8_model_init


def test_no_answer_is_for_a_name_that_exists_or_that_transformer_engine_does_not_have() -> None:
    assert answers.PYTORCH.keys() <= {*TE_PYTORCH}
    assert answers.RECIPE.keys() <= {*TE_RECIPE}
    for path, module in sys.modules.items():
        if path.startswith(te.__name__):
            assert not vars(module).keys() & (answers.PYTORCH if module is te else answers.NAMES).keys(), path


def test_deep_names_are_those_of_the_package() -> None:
    """Attributes of te, too, without an import; a file that Transformer Engine does not have is an ordinary error."""
    assert te.module.layernorm_linear.LayerNormLinear is te.LayerNormLinear
    assert te.attention.dot_product_attention.dot_product_attention.DotProductAttention is te.DotProductAttention
    assert te.attention.inference.InferenceParams is te.InferenceParams
    assert not hasattr(te.ops.basic.rmsnorm, "RMSNorm")  # type: ignore[attr-defined]
    with pytest.raises(ModuleNotFoundError, match="No module named '.*module.liner'"):
        importlib.import_module("lightning_fp8.transformer_engine.pytorch.module.liner")


def test_a_name_of_neither_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match=r"^module '.*engine.pytorch' has no attribute 'Lin'$"):
        te.Lin  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Lin'"):
        _imported("lightning_fp8.transformer_engine.pytorch", "Lin")
    with pytest.raises(ModuleNotFoundError, match="No module named 'lightning_fp8.transformer_engine.jax'"):
        importlib.import_module("lightning_fp8.transformer_engine.jax")


ANSWERS = {answer for table in (answers.RECIPE, answers.NAMES, answers.MODULES) for answer in table.values()}


@pytest.mark.parametrize("answer", sorted(ANSWERS))
def test_an_answer_names_what_exists(answer: str) -> None:
    for path in re.findall(r"\b(?:torch|lightning_fp8)(?:\.\w+)+", answer):
        if path == "torch.optim.Muon" and not hasattr(torch.optim, "Muon"):
            continue  # since torch 2.9
        _resolved(path)
    for name in re.findall(r"\b(?:[A-Z]\w*[a-z]\w*[A-Z]\w+|RecipeFields)\b", answer):
        known = hasattr(te, name) or hasattr(te_recipe, name)
        assert known or name in ("Linear", "ModuleList", "BF16"), name


def _resolved(path: str) -> Any:
    """The object of a dotted path, whose first parts are modules."""
    parts = path.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:depth]))
        except ModuleNotFoundError:
            continue
        for part in parts[depth:]:
            found = getattr(found, part)
        return found
    raise AssertionError(path)


def test_a_training_step_under_transformer_engines_names() -> None:
    layer = te.LayerNormMLP(32, 64, normalization="RMSNorm", activation="swiglu")
    recipe = te_recipe.DelayedScaling(fp8_format=te_recipe.Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = layer.fc1_weight.detach().clone()
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        y = te.checkpoint(layer, torch.randn(8, 32, requires_grad=True))
    y.square().mean().backward()
    optimizer.step()
    assert not torch.equal(layer.fc1_weight, before)
    assert layer.history is not None
    assert bool((layer.history.scale > 0).all())


def test_rotary_embeddings_by_transformer_engines_arguments() -> None:
    """A turn by an angle is a product of complex numbers."""
    t, freqs = torch.randn(5, 2, 3, 8), te.RotaryPositionEmbedding(8)(9)
    angles = freqs[2:7, 0, 0, :4].double()
    turned = torch.complex(t[..., :4], t[..., 4:]) * torch.polar(torch.ones_like(angles), angles)[:, None, None]
    y = te.attention.apply_rotary_pos_emb(t, freqs, "sbhd", start_positions=torch.tensor([2, 2]), fused=True)
    torch.testing.assert_close(y, torch.cat([turned.real, turned.imag], -1).float(), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match=r"cp_size=2 is not supported.*get_batch_on_this_cp_rank\(freqs"):
        te.attention.apply_rotary_pos_emb(t, freqs, cp_size=2)
    with pytest.raises(ValueError, match="tensor_format='bhsd' is unknown; use one of 'sbhd'"):
        te.attention.apply_rotary_pos_emb(t, freqs, "bhsd")


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("channels", [8, 4])
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
def test_rotary_embeddings_are_contiguous(tensor_format: str, channels: int, fused: bool) -> None:
    """Whatever the strides of the tensor, as in Transformer Engine."""
    freqs, shape = te.RotaryPositionEmbedding(channels)(7), (7, 3, 8) if tensor_format == "thd" else (5, 7, 3, 8)
    shape = (7, 5, 3, 8) if tensor_format == "sbhd" else shape
    call = {"cu_seqlens": torch.tensor([0, 3, 7])} if tensor_format == "thd" else {}
    t = torch.randn(shape)
    expected = te.attention.rope.apply_rotary_pos_emb(t, freqs, tensor_format, fused=fused, **call)
    for dims in permutations(range(t.dim())):
        strided = t.permute(dims).contiguous().permute(*(dims.index(dim) for dim in range(t.dim())))
        y = te.attention.rope.apply_rotary_pos_emb(strided, freqs, tensor_format, fused=fused, **call)
        assert y.is_contiguous()
        assert torch.equal(y, expected)


@pytest.mark.parametrize(
    ("capability", "available"),
    [
        (None, (False, False, False)),
        ((8, 0), (False, False, False)),
        ((8, 9), (True, True, False)),
        ((9, 0), (True, True, False)),
        ((10, 0), (True, False, True)),
        ((12, 0), (True, True, True)),
    ],
)
def test_what_a_device_computes_in_fp8(
    capability: tuple[int, int] | None, available: tuple[bool, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of docs/kernels.md: what the default starts where."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert (te.is_fp8_available(), te.is_fp8_block_scaling_available(), te.is_mxfp8_available()) == available
    assert not te.is_nvfp4_available()
    questions = (
        te.is_fp8_available, te.is_fp8_block_scaling_available, te.is_mxfp8_available, te.is_nvfp4_available
    )  # fmt: skip
    for question in questions:
        answer, reason = question(return_reason=True)  # type: ignore[misc]
        assert answer == question() == (reason == "")
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    assert not te.is_mxfp8_available()


# --- Recipes ----------------------------------------------------------------------------------------------------------

TE_FIELDS: dict[str, dict[str, Any]] = {
    "DelayedScaling": {
        "margin": 0, "fp8_format": te_recipe.Format.HYBRID, "amax_history_len": 1024, "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None, "reduce_amax": True, "override_linear_precision": (False, False, False),
    },
    "Float8CurrentScaling": {
        "use_power_2_scales": False, "fp8_format": te_recipe.Format.HYBRID,
        "fp8_gemm_fprop": te_recipe.MMParams(use_split_accumulator=False),
        "fp8_gemm_dgrad": te_recipe.MMParams(), "fp8_gemm_wgrad": te_recipe.MMParams(),
    },
    "MXFP8BlockScaling": {"margin": 0, "fp8_format": te_recipe.Format.E4M3, "enable_2d_quantization": False},
    "Float8BlockScaling": {
        "use_f32_scales": False, "fp8_format": te_recipe.Format.E4M3,
        "x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1,
        "fp8_gemm_fprop": te_recipe.MMParams(), "fp8_gemm_dgrad": te_recipe.MMParams(),
        "fp8_gemm_wgrad": te_recipe.MMParams(),
    },
}  # fmt: skip
"""Transformer Engine's fields of each recipe, and their defaults; ``override_linear_precision`` is of 1.x."""

for _fields in TE_FIELDS.values():
    _fields |= {"fp8_dpa": False, "fp8_mha": False, "backward_override": None}


@pytest.mark.parametrize("recipe", TE_FIELDS)
def test_transformer_engines_defaults_make_the_default_recipe(recipe: str) -> None:
    cls = getattr(te_recipe, recipe)
    assert cls(**TE_FIELDS[recipe]) == cls()
    fields = TE_FIELDS[recipe] | {"name": cls().name}
    assert lightning_fp8.make_recipe(fields) == cls()


OTHERS: list[tuple[str, str, Any, str]] = [
    ("DelayedScaling", "scaling_factor_compute_algo", max, "scales are fp8_max"),
    ("DelayedScaling", "override_linear_precision", (False, False, True), "keeps both of the backward pass"),
    ("Float8CurrentScaling", "fp8_gemm_fprop", te_recipe.MMParams(), "accumulates fast"),
    ("Float8CurrentScaling", "fp8_gemm_wgrad", te_recipe.MMParams(use_split_accumulator=False), "in float32"),
    ("MXFP8BlockScaling", "margin", 1, "leave it out"),
    ("MXFP8BlockScaling", "enable_2d_quantization", True, "blocks are 1 × 32"),
    ("Float8BlockScaling", "x_block_scaling_dim", 2, "blocks are 1 × 128"),
    ("Float8BlockScaling", "w_block_scaling_dim", True, "blocks are 1 × 128"),
]


@pytest.mark.parametrize(("recipe", "argument", "value", "instead"), OTHERS)
def test_another_value_is_refused_with_the_way_out(recipe: str, argument: str, value: Any, instead: str) -> None:
    said = rf"^{argument}={re.escape(repr(value))} is not supported by {recipe}: .*{instead}"
    with pytest.raises(NotImplementedError, match=said):
        getattr(te_recipe, recipe)(**{argument: value})


def test_flags_of_other_names_set_the_field() -> None:
    assert te_recipe.Float8CurrentScaling(use_power_2_scales=True).power_2_scale
    assert not te_recipe.Float8BlockScaling(use_f32_scales=True).power_2_scale
    assert lightning_fp8.make_recipe({"name": "blockwise", "use_f32_scales": True}) == te_recipe.Float8BlockScaling(
        power_2_scale=False
    )
    with pytest.raises(TypeError, match="use_f32_scales='false' must be True or False"):
        te_recipe.Float8BlockScaling(use_f32_scales="false")
    with pytest.raises(ValueError, match="use_power_2_scales=True and power_2_scale are the same option"):
        te_recipe.Float8CurrentScaling(use_power_2_scales=True, power_2_scale=True)


def test_a_subclass_passes_transformer_engines_arguments_on() -> None:
    """As Megatron-LM's does."""

    class Delayed(te_recipe.DelayedScaling):
        def __init__(self, wgrad_in_fp8: bool) -> None:
            super().__init__(margin=1, override_linear_precision=(False, False, not wgrad_in_fp8))

    assert Delayed(True).margin == 1
    with pytest.raises(NotImplementedError, match="override_linear_precision"):
        Delayed(False)


@pytest.mark.parametrize(
    ("recipe", "true_of"),
    [
        ("DelayedScaling", {"delayed", "float8_per_tensor_scaling"}),
        ("Float8CurrentScaling", {"float8_current_scaling", "float8_per_tensor_scaling"}),
        ("Float8BlockScaling", {"float8_block_scaling"}),
        ("MXFP8BlockScaling", {"mxfp8"}),
        ("Float8RowwiseScaling", set()),
    ],
)
def test_what_transformer_engine_asks_of_a_recipe(recipe: str, true_of: set[str]) -> None:
    made = getattr(lightning_fp8, recipe)()
    questions = (
        *("delayed", "float8_current_scaling", "float8_per_tensor_scaling", "float8_block_scaling", "mxfp8"),
        *("nvfp4", "custom"),
    )
    assert {question for question in questions if getattr(made, question)()} == true_of
    assert isinstance(made, te_recipe.Recipe)


# --- torchao ----------------------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """Two blocks and a head tied to an embedding, which ``convert_module`` would all leave in BF16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        self.lm_head = nn.Linear(32, 48, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        y: Tensor = self.lm_head(x)
        return y


LINEARS = ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2", "lm_head"]
TOKENS = torch.arange(24).reshape(2, 12)


def _decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


def _gradients(model: nn.Module, loss: Callable[[Tensor], Tensor] = torch.sum) -> list[Tensor]:
    loss(model(TOKENS)).backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_after_the_call_a_model_runs_in_fp8_without_a_region(name: str) -> None:
    """As inside of ``fp8_autocast``, whose numerics the tests of recipes hold against references."""
    model = _decoder()
    weights = [*model.parameters()]
    config = ao.Float8LinearConfig.from_recipe_name(name)
    assert ao.convert_to_float8_training(model, config=config) is model
    assert [each is weight for each, weight in zip(model.parameters(), weights)] == [True] * len(weights)
    in_region = _decoder()
    lightning_fp8.convert_module(in_region, first_last_layers_bf16=False)
    in_region.lm_head.__class__ = lightning_fp8.Linear
    with lightning_fp8.fp8_autocast(fp8_recipe=name):
        expected = in_region(TOKENS)
    expected.sum().backward()
    y = model(TOKENS)
    y.sum().backward()
    assert torch.equal(y, expected)
    for parameter, other in zip(model.parameters(), in_region.parameters()):
        assert parameter.grad is not None
        assert other.grad is not None
        assert torch.equal(parameter.grad, other.grad)
    assert not torch.allclose(y, _decoder()(TOKENS), rtol=1e-3, atol=1e-3)


def test_a_filter_says_which_layers_run_in_fp8() -> None:
    model = _decoder()
    asked = []

    def only_the_first_block(module: nn.Module, fqn: str) -> bool:
        asked.append((type(module), fqn))
        return fqn.startswith("blocks.0.")

    ao.convert_to_float8_training(model, module_filter_fn=only_the_first_block)
    assert asked == [(nn.Linear, name) for name in LINEARS]
    found = {name: type(module) for name, module in model.named_modules() if name in LINEARS}
    assert [name for name, cls in found.items() if cls is lightning_fp8.Linear] == LINEARS[:2]
    assert {found[name] for name in LINEARS[2:]} == {nn.Linear}


def _first(module: nn.Module, name: str) -> bool:
    return name.startswith("blocks.0.")


ROWWISE = ao.Float8LinearConfig.from_recipe_name("rowwise")


def _runs(model: nn.Module) -> dict[str, str]:
    """For each linear layer, the recipe that a layer alone computes the same by; "none" in high precision."""
    found = {}
    for name in LINEARS:
        layer: Any = model.get_submodule(name)
        x = torch.randn(4, layer.in_features)
        alone = lightning_fp8.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        alone.load_state_dict(layer.state_dict())
        results = {"none": nn.functional.linear(x, layer.weight, layer.bias)}
        for recipe in ("tensorwise", "rowwise", "delayed"):
            with lightning_fp8.fp8_autocast(fp8_recipe=recipe):
                results.setdefault(recipe, alone(x))
        y = layer(x)
        found[name] = next(recipe for recipe, expected in results.items() if torch.equal(y, expected))
    return found


def _expected(first: str, others: str) -> dict[str, str]:
    return {name: first if name.startswith("blocks.0.") else others for name in LINEARS}


def test_a_second_call_leaves_the_layers_of_the_first_alone() -> None:
    """Two filters and two configurations, in either order, and in a region of neither."""
    model = ao.convert_to_float8_training(_decoder(), module_filter_fn=_first, config=ROWWISE)
    assert _runs(model) == _expected("rowwise", "none")
    ao.convert_to_float8_training(model, module_filter_fn=lambda module, name: not _first(module, name))
    assert _runs(model) == _expected("rowwise", "tensorwise")
    with pytest.warns(UserWarning, match="converts no layer"):
        ao.convert_to_float8_training(model, module_filter_fn=lambda module, name: False)
    assert _runs(model) == _expected("rowwise", "tensorwise")
    assert all(gradient.isfinite().all() for gradient in _gradients(model))


def test_a_layer_that_is_chosen_again_gets_the_new_configuration() -> None:
    """As in torchao: the filter is asked about converted layers, too."""
    model = ao.convert_to_float8_training(_decoder(), config=ROWWISE)
    asked = []

    def is_first(module: nn.Module, name: str) -> bool:
        asked.append(name)
        return _first(module, name)

    ao.convert_to_float8_training(model, module_filter_fn=is_first)
    assert asked == LINEARS
    assert _runs(model) == _expected("tensorwise", "rowwise")


def test_blocks_are_converted_one_by_one_and_inside_of_the_model() -> None:
    model = _decoder()
    ao.convert_to_float8_training(model.blocks[0], config=ROWWISE)
    ao.convert_to_float8_training(model, module_filter_fn=lambda module, name: not _first(module, name))
    assert _runs(model) == _expected("rowwise", "tensorwise")
    ao.convert_to_float8_training(model.blocks[0][0])
    assert _runs(model) == {**_expected("rowwise", "tensorwise"), "blocks.0.0": "tensorwise"}
    layer = model.blocks[0][2]
    assert ao.convert_to_float8_training(layer) is ao.convert_to_float8_training(layer, config=ROWWISE)
    assert _runs(model) == {**_expected("rowwise", "tensorwise"), "blocks.0.0": "tensorwise"}


def test_before_and_after_convert_module() -> None:
    model = _decoder()
    lightning_fp8.convert_module(model, first_last_layers_bf16=False)
    ao.convert_to_float8_training(model, module_filter_fn=_first)
    assert _runs(model) == _expected("tensorwise", "none")
    with lightning_fp8.fp8_autocast(fp8_recipe="delayed"):
        model(TOKENS)
    recorded = {name: model.get_submodule(name).record.fp8 for name in LINEARS[:-1]}  # type: ignore[union-attr, operator]
    assert recorded == {**dict.fromkeys(LINEARS[:2], 2), **dict.fromkeys(LINEARS[2:4], 1)}

    model = ao.convert_to_float8_training(_decoder(), module_filter_fn=_first, config=ROWWISE)
    lightning_fp8.convert_module(model, num_layers_at_end_in_bf16=0)  # the first block would stay in BF16
    assert _runs(model) == _expected("rowwise", "none")
    assert type(model.blocks[1][0]) is lightning_fp8.Linear
    lightning_fp8.convert_module(model, skip=["blocks.0.0"])
    assert _runs(model) == {**_expected("rowwise", "none"), "blocks.0.0": "none"}
    ao.convert_to_float8_training(model, module_filter_fn=lambda module, name: name == "lm_head")
    assert _runs(model)["blocks.0.0"] == "none"


def test_before_and_after_the_plugin() -> None:
    model = ao.convert_to_float8_training(_decoder(), module_filter_fn=_first, config=ROWWISE)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=lightning_fp8.FP8FabricPrecision("delayed"))
    fabric.setup_module(model)
    assert {name for name, each in model.named_modules() if isinstance(each, lightning_fp8.Linear) and each.fp8} == {
        *LINEARS[:2]
    }
    ao.convert_to_float8_training(model, module_filter_fn=lambda module, name: name == "lm_head")
    fp8 = [name for name in LINEARS if getattr(model.get_submodule(name), "fp8", False)]
    assert fp8 == [*LINEARS[:2], "lm_head"]


def test_a_single_linear_is_converted_itself() -> None:
    layer = nn.Linear(32, 16)
    x = torch.randn(4, 32)
    in_high_precision = layer(x)
    assert ao.convert_to_float8_training(layer) is layer
    assert not torch.equal(layer(x), in_high_precision)


def test_a_region_around_it_rules() -> None:
    layer = ao.convert_to_float8_training(nn.Linear(32, 16))
    x = torch.randn(4, 32)
    with lightning_fp8.fp8_autocast(enabled=False):
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    tensorwise = layer(x)
    with lightning_fp8.fp8_autocast(fp8_recipe="mxfp8"):
        assert not torch.equal(layer(x), tensorwise)
    assert torch.equal(layer(x), tensorwise)


def test_copies_recomputation_export_and_compiled_code_run_in_fp8_too() -> None:
    model = ao.convert_to_float8_training(_decoder())
    expected = model(TOKENS)
    gradients = [each.clone() for each in _gradients(model)]
    copied = copy.deepcopy(model)
    assert torch.equal(copied(TOKENS), expected)
    assert torch.equal(pickle.loads(pickle.dumps(copied))(TOKENS), expected)
    model.zero_grad()
    checkpointed = copy.deepcopy(model)
    for block in checkpointed.blocks:
        block.forward = partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
    assert all(map(torch.equal, _gradients(checkpointed), gradients))
    with lightning_fp8.onnx_export(enabled=True):
        assert torch.equal(model(TOKENS), expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(TOKENS), expected)
    assert all(map(torch.equal, _gradients(compiled), gradients))


def test_what_cannot_run_in_fp8_is_named() -> None:
    model = nn.TransformerEncoderLayer(32, 2, 64)
    with pytest.warns(UserWarning, match="leaves layers in high precision: self_attn.out_proj: nn.MultiheadAttention"):
        ao.convert_to_float8_training(model)


AXISWISE = ao.CastConfig(scaling_granularity=ao.ScalingGranularity.AXISWISE)
DISABLED = ao.CastConfig(scaling_type=ao.ScalingType.DISABLED)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"emulate": True}, "emulate=True is not supported: FP8 layers run without FP8 tensor cores"),
        ({"gemm_config_output": ao.Float8GemmConfig()}, "gemm_config_output=.*accumulates fast"),
        ({"gemm_config_grad_input": ao.Float8GemmConfig(use_fast_accum=True)}, "gemm_config_grad_input=.*in float32"),
        ({"cast_config_weight": AXISWISE}, "cast_config_weight=.*the same granularity"),
        ({"cast_config_grad_output_for_grad_weight": DISABLED}, "grad_weight=.*for both of its products alike"),
        ({"cast_config_input": DISABLED}, "cast_config_input=.*by module_filter_fn"),
        ({"cast_config_weight": ao.CastConfig(target_dtype=torch.float8_e5m2)}, "inputs and weights are cast to E4M3"),
        (
            dict.fromkeys(("cast_config_input", "cast_config_weight", "cast_config_grad_output"), AXISWISE),
            "round_scales_to_power_of_2=False is not supported.*pass True",
        ),
    ],
)
def test_a_configuration_that_is_not_supported_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(NotImplementedError, match=said):
        ao.Float8LinearConfig(**arguments)


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ValueError, match="recipe_name='block' is unknown; use one of 'tensorwise', 'rowwise'"):
        ao.Float8LinearConfig.from_recipe_name("block")
    with pytest.raises(NotImplementedError, match="'rowwise_with_gw_hp' is not supported: .*use 'rowwise'"):
        ao.Float8LinearConfig.from_recipe_name(ao.Float8LinearRecipeName.ROWWISE_WITH_GW_HP)
    with pytest.raises(TypeError, match="pad_inner_dim=1 must be True or False"):
        ao.Float8LinearConfig(pad_inner_dim=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cast_config_input='e4m3' must be a CastConfig$"):
        ao.Float8LinearConfig(cast_config_input="e4m3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"config='rowwise' must be a .*Float8LinearConfig"):
        ao.convert_to_float8_training(nn.Linear(2, 2), config="rowwise")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="convert_to_float8_training takes a torch.nn.Module"):
        ao.convert_to_float8_training("model")  # type: ignore[arg-type]


def test_formats_and_powers_of_two_are_the_recipes() -> None:
    in_e4m3 = ao.CastConfig(target_dtype=torch.float8_e4m3fn)
    config = ao.Float8LinearConfig(cast_config_grad_output=in_e4m3, round_scales_to_power_of_2=True)
    assert config.recipe() == lightning_fp8.Float8CurrentScaling(lightning_fp8.Format.E4M3, power_2_scale=True)
    assert ao.Float8LinearConfig().recipe() == lightning_fp8.Float8CurrentScaling()
    rowwise = ao.Float8LinearConfig.from_recipe_name("rowwise").recipe()
    assert rowwise == lightning_fp8.Float8RowwiseScaling(lightning_fp8.Format.E4M3)


@pytest.mark.parametrize("name", ["_auto_filter_for_recipe", "FP8Granularity"])
def test_torchaos_other_names_are_answered(name: str) -> None:
    with pytest.raises(ImportError, match=f"^{name} is not supported: "):
        _imported("lightning_fp8.torchao.float8", name)


STYLES = ("Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput")


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("config", [name for name in ao.__all__ if isinstance(getattr(ao, name), type)]),
        ("float8_linear", ["Float8Linear"]),
        ("float8_linear_utils", ["convert_to_float8_training"]),
        ("fsdp_utils", ["precompute_float8_dynamic_scale_for_fsdp"]),
        ("float8_tensor_parallel", STYLES),
    ],
)
def test_names_are_in_torchaos_modules(module: str, names: list[str]) -> None:
    home = f"lightning_fp8.torchao.float8.{module}"
    assert {*importlib.import_module(home).__all__} == {*names}
    for name in names:
        assert _imported(home, name) is getattr(ao, name, _imported(home, name))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(("float8_linear_utils", "_auto_filter_for_recipe"), ("float8_linear_utils", "swap_linear_layers")),
        *(("fsdp_utils", "WeightWithDynamicFloat8CastTensor"), ("config", "Float8TypeConfig")),
        *(("float8_linear", "matmul_with_hp_or_float8_args"), ("float8_training_tensor", "Float8TrainingTensor")),
        *(("float8_utils", "compute_error"), ("inference", "Float8MMConfig"), ("types", "FP8Granularity")),
    ],
)
def test_other_names_of_torchaos_modules_are_answered(module: str, name: str) -> None:
    with pytest.raises(ImportError, match=f"^{name} is not supported: "):
        _imported(f"lightning_fp8.torchao.float8.{module}", name)


def test_converted_layers_are_float8_linear() -> None:
    model = ao.convert_to_float8_training(_decoder(), module_filter_fn=lambda module, name: name != "lm_head")
    cls = _imported("lightning_fp8.torchao.float8.float8_linear", "Float8Linear")
    assert [name for name, each in model.named_modules() if isinstance(each, cls)] == LINEARS[:-1]


@pytest.fixture
def torchao() -> Any:
    """torchao itself, which no test environment has to have."""
    return pytest.importorskip("torchao.float8")


def test_a_filter_that_chooses_nothing_and_a_misspelled_recipe() -> None:
    with pytest.warns(UserWarning, match="converts no layer"):
        ao.convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), module_filter_fn=lambda module, name: False)
    with pytest.raises(ValueError, match=r"recipe_name='rowise' is unknown; use one of 'tensorwise', 'rowwise'$"):
        ao.Float8LinearConfig.from_recipe_name("rowise")


def test_configurations_have_torchaos_fields(torchao: Any) -> None:
    for name in ("CastConfig", "Float8GemmConfig", "Float8LinearConfig"):
        ours, theirs = ([field.name for field in fields(getattr(home, name))] for home in (ao, torchao))
        assert ours == theirs
    for name in ("ScalingType", "ScalingGranularity", "Float8LinearRecipeName"):
        assert {each.value for each in getattr(ao, name)} == {each.value for each in getattr(torchao, name)}
    assert {name for name in torchao.__all__ if not hasattr(ao, name)} <= ao_answers.NAMES.keys()
    folder = Path(torchao.__file__).parent
    modules = {each.stem for each in folder.glob("*.py") if each.stem not in ("__init__", "_inductor_patch")}
    ours = {each.stem for each in Path(ao.__file__).parent.glob("*.py")} - {"__init__"}
    assert modules == ours | ao_answers.MODULES.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("size", [64, 1024])
def test_a_layer_computes_what_torchaos_does(size: int, name: str, dtype: torch.dtype, torchao: Any) -> None:
    """To the bit, but for the order of long sums, and that torchao divides in float64 for the scale of a tensor."""
    torch.manual_seed(0)
    theirs = nn.Linear(size, 48, bias=False, dtype=dtype)
    ours = copy.deepcopy(theirs)
    config = torchao.Float8LinearConfig.from_recipe_name(name)
    theirs = torchao.convert_to_float8_training(theirs, config=replace(config, emulate=True))
    ao.convert_to_float8_training(ours, config=ao.Float8LinearConfig.from_recipe_name(name))
    x, dy = torch.randn(32, size, dtype=dtype), torch.randn(32, 48, dtype=dtype)
    results = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(dy)
        results.append((y, leaf.grad, layer.weight.grad))
    exact = name == "rowwise" and size == 64
    relative = 0.0 if exact else 1e-6 if dtype == torch.float32 else 2**-7
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected, rtol=relative, atol=relative * expected.abs().max().item())


# --- The tables of docs/migration.md ----------------------------------------------------------------------------------

PAGE = Path(__file__).parents[1] / "docs/migration.md"


@cache
def _rows(heading: str) -> list[tuple[list[str], str]]:
    """Of the tables under ``heading``, each row's pieces of code on the left, and its right side."""
    (section,) = re.findall(rf"^#+ {re.escape(heading)}$(.*?)(?=^#|\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    cells = re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)
    return [(_code(left), right) for left, right in cells if "`" in left]


def _code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


NAMES = {
    "Names of transformer_engine.pytorch": ["pytorch"],
    "Modules of transformer_engine.pytorch without a name here": ["pytorch"],
    "Names of transformer_engine.pytorch.fp8 and quantization": ["pytorch.fp8", "pytorch.quantization"],
    "Names of transformer_engine.pytorch.distributed and export": ["pytorch.distributed", "pytorch.export"],
    "Names of transformer_engine.pytorch.attention": ["pytorch.attention"],
    "Names of transformer_engine.common.recipe": ["common.recipe"],
    "Names of torchao.float8": ["float8", "float8.float8_linear", "float8.float8_tensor_parallel"],
}
"""By heading, the modules that the names of its table are imported from, one of which has or answers each."""


@pytest.mark.parametrize(
    ("heading", "name", "right"),
    [(heading, name, right) for heading in NAMES for names, right in _rows(heading) for name in names],
    ids=str,
)
def test_a_name_of_the_page_is_importable_or_raises_the_sentence(heading: str, name: str, right: str) -> None:
    package = "torchao" if heading.endswith("float8") else "transformer_engine"
    homes = [importlib.import_module(f"lightning_fp8.{package}.{module}") for module in NAMES[heading]]
    if right.startswith("the same"):
        assert any(hasattr(home, name) for home in homes)
        return
    modules = answers.MODULES if "pytorch" in NAMES[heading] else ao_answers.MODULES if package == "torchao" else ()
    if name in modules:
        with pytest.raises(ImportError, match=rf"^Anything is not supported: {re.escape(right)}$"):
            _imported(f"{homes[0].__name__}.{name}", "Anything")
        return
    said = set()
    for home in homes:
        with pytest.raises(ImportError) as error:
            _imported(home.__name__, name)
        said.add(str(error.value))
    assert f"{name} is not supported: {right}" in said


def test_the_page_has_every_name() -> None:
    on_page = {heading: {name for names, _ in _rows(heading) for name in names} for heading in NAMES}
    known = on_page["Names of transformer_engine.pytorch"]
    known |= on_page["Modules of transformer_engine.pytorch without a name here"]
    assert known == {*TE_PYTORCH, *answers.MODULES}
    assert on_page["Names of transformer_engine.common.recipe"] == {*TE_RECIPE}
    of_torchao = {*ao.__all__, "Float8Linear", *STYLES, *ao_answers.NAMES, *ao_answers.MODULES}
    assert on_page["Names of torchao.float8"] == of_torchao


EXPRESSIONS = {
    "Arguments of modules": vars(te) | {"torch": torch},
    "Arguments of recipes": vars(te_recipe),
    "Configurations": vars(ao) | {"torch": torch},
}
"""By heading, the names that the expressions of its table are evaluated with."""


@pytest.mark.parametrize(
    ("heading", "expression", "right"),
    [(heading, each, right) for heading in EXPRESSIONS for lefts, right in _rows(heading) for each in lefts],
    ids=str,
)
def test_an_expression_of_the_page_is_the_recipe_or_raises_the_sentence(
    heading: str, expression: str, right: str
) -> None:
    names = EXPRESSIONS[heading]
    if right.startswith("`"):
        made = eval(expression, {**names})
        found = made.recipe() if isinstance(made, ao.Float8LinearConfig) else made
        assert found == eval(_code(right)[0], {**vars(te_recipe), **_ours()})
        return
    with pytest.raises((NotImplementedError, TypeError, ValueError), match=re.escape(right)):
        eval(expression, {**names})


def _ours() -> dict[str, Any]:
    return {name: getattr(lightning_fp8, name) for name in lightning_fp8.__all__}


@pytest.mark.parametrize(
    ("key", "right"), [(key, right) for keys, right in _rows("Megatron-LM") for key in keys], ids=str
)
def test_a_key_of_megatron_is_the_recipe_or_raises_the_sentence(key: str, right: str) -> None:
    config = {"fp8_recipe": "delayed", **eval(f"dict({key})")}
    if right.startswith("`"):
        assert lightning_fp8.make_recipe(config) == eval(_code(right)[0], _ours())
        return
    with pytest.raises((NotImplementedError, ValueError), match=re.escape(right)):
        lightning_fp8.make_recipe(config)


def test_megatrons_other_keys_are_taken_at_its_defaults() -> None:
    config = {
        "fp8": "hybrid", "fp8_wgrad": True, "fp8_param": False, "fp8_output_proj": False, "tp_only_amax_red": False,
        "fp8_quantizer_factory": None, "first_last_layers_bf16": False, "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
    }  # fmt: skip
    assert lightning_fp8.make_recipe(config) == lightning_fp8.DelayedScaling()


def test_lightnings_own_plugin_has_the_arguments_of_the_page() -> None:
    rows = [(*left, *_code(right)) for left, right in _rows("Lightning's TransformerEnginePrecision")[:4]]
    theirs = inspect.signature(TransformerEnginePrecision.__init__).parameters.keys() - {"self"}
    assert {left for left, _ in rows} == theirs
    assert {right for _, right in rows} <= inspect.signature(lightning_fp8.FP8Precision).parameters.keys()


def test_names_of_ours_on_the_page_exist() -> None:
    """Each call on the right of the tables of free text, and its keyword arguments."""
    headings = ("What code reads and sets", "In the Trainer", "MS-AMP", "Lightning's TransformerEnginePrecision")
    calls = [
        call
        for heading in headings
        for _, right in _rows(heading)
        for code in _code(right)
        for call in re.findall(r"\b([\w.]*[a-z_A-Z])\(((?:[^()]|\([^()]*\))*)\)", code)
    ]
    assert len(calls) > 8
    known = {**_ours(), "isinstance": isinstance}
    for name, arguments in calls:
        found = known[name] if name in known else _resolved(name)
        for keyword in re.findall(r"(?:^|[ ,(])(\w+)=(?!=)", arguments):
            parameters = inspect.signature(found).parameters
            assert keyword in parameters or "changes" in parameters, (name, keyword)
