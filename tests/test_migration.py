"""Names of other projects' FP8 here: what works under them, and what is said of the others."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_fp8
import lightning_fp8.transformer_engine.pytorch as te
from lightning_fp8.fp8_region import current_context
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
utils cpp_extensions
""")
"""The names of ``transformer_engine.pytorch`` 2.20, and those of its modules that others import from."""

TE_RECIPE = _names("""
Format MMParams QParams Recipe DelayedScaling Float8CurrentScaling MXFP8BlockScaling Float8BlockScaling
NVFP4BlockScaling CustomRecipe
""")

TE_ELSEWHERE = {
    "fp8": "FP8GlobalStateManager RecipeState fp8_autocast fp8_model_init DelayedScaling Recipe get_fp8_max",
    "quantization": "FP8GlobalStateManager autocast get_align_size_for_quantization check_recipe_support",
    "module": "Linear LayerNormLinear LayerNormMLP LayerNorm RMSNorm GroupedLinear Fp8Padding initialize_ub",
    "attention": "DotProductAttention MultiheadAttention InferenceParams RotaryPositionEmbedding",
    "distributed": "checkpoint CudaRNGStatesTracker activation_recompute_forward gather_split_1d_tensor",
    "export": "onnx_export te_translation_table",
    "transformer": "TransformerLayer",
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
    tables = {"": "PYTORCH", "module": "MODULE", "attention": "ATTENTION", "distributed": "DISTRIBUTED", "fp8": "STATE"}
    for module, table in tables.items():
        home = importlib.import_module(f"lightning_fp8.transformer_engine.pytorch.{module}".strip("."))
        assert not vars(home).keys() & getattr(answers, table).keys()


def test_a_name_of_neither_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match=r"^module '.*engine.pytorch' has no attribute 'Lin'$"):
        te.Lin  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Lin'"):
        _imported("lightning_fp8.transformer_engine.pytorch", "Lin")
    with pytest.raises(ModuleNotFoundError, match="No module named 'lightning_fp8.transformer_engine.jax'"):
        importlib.import_module("lightning_fp8.transformer_engine.jax")


ANSWERS = {
    answer
    for table in (answers.RECIPE, answers.STATE, answers.PYTORCH, answers.MODULES, answers.DISTRIBUTED, answers.EXPORT)
    for answer in table.values()
}


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


@pytest.mark.parametrize(
    ("capability", "available"),
    [
        (None, (False, False)),
        ((8, 0), (False, False)),
        ((8, 9), (True, True)),
        ((9, 0), (True, True)),
        ((10, 0), (True, False)),
        ((12, 0), (True, True)),
    ],
)
def test_what_a_device_computes_in_fp8(
    capability: tuple[int, int] | None, available: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of docs/kernels.md: what the default starts where."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert (te.is_fp8_available(), te.is_fp8_block_scaling_available()) == available
    assert (te.is_mxfp8_available(), te.is_nvfp4_available()) == (False, False)
    questions = (
        te.is_fp8_available, te.is_fp8_block_scaling_available, te.is_mxfp8_available, te.is_nvfp4_available
    )  # fmt: skip
    for question in questions:
        answer, reason = question(return_reason=True)  # type: ignore[misc]
        assert answer == question() == (reason == "")


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
    ("DelayedScaling", "override_linear_precision", (False, False, True), "keep the whole layer in BF16 with skip="),
    ("DelayedScaling", "backward_override", "dequantized", "leave it out"),
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
