"""Every class of transformers' experts, by its own forward in float64; models of the families that the docs name."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import conversion_summary, convert_module
from lightning_fp8.functions.grouped import MANY_EXPERTS
from lightning_fp8.modules.experts import Experts
from tests.tiers import thorough

transformers = pytest.importorskip("transformers")
MODELS = Path(transformers.__file__).parent / "models"
EXPERTS, HIDDEN, INNER, TOKENS, TOP_K = 4, 32, 48, 24, 2

DECORATED = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.MULTILINE)
CLASSES = {
    name: f"transformers.models.{path.parent.name}.{path.stem}"
    for path in sorted(MODELS.glob("*/modeling_*.py"))
    for name in DECORATED.findall(path.read_text())
}
"""The module of each class."""
SEVERAL = "MixtralExperts", "GptOssExperts", "AriaExperts", "NemotronHExperts", "MuseSparkExperts"
"""Plain ones; transposed and interleaved with biases; transposed; without a gate; with a norm behind."""
NOT_DECORATED = {
    "transformers.models.llama4.modeling_llama4": "Llama4TextExperts",
    "transformers.models.longcat_flash.modeling_longcat_flash": "LongcatFlashExperts",
    "transformers.models.step3p7.modeling_step3p7": "Step3p7Experts",
}
"""With forwards of their own and 3-D parameters."""

pytestmark = pytest.mark.skipif(not CLASSES, reason="transformers before 5 keeps experts in a ModuleList of Linear")


class Sizes:
    """A configuration of small experts for any class, by what names of sizes contain."""

    _experts_implementation = "eager"
    hidden_act = activation = mlp_hidden_act = hidden_activation = "silu"
    swiglu_limit, swiglu_alpha = 7.0, 1.702
    rms_norm_eps = norm_eps = post_norm_eps = layer_norm_epsilon = 1e-5
    mlp_bias = False
    moe_latent_size = None
    zero_expert_num = 1

    def __getattr__(self, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        if "expert" in name and not any(part in name for part in ("size", "dim", "width")):
            return EXPERTS
        return HIDDEN if name in ("hidden_size", "moe_hidden_size", "embed_dim", "d_model") else INNER


def made(module: str, name: str) -> nn.Module:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"this version of transformers has no {module}")
    experts: nn.Module = getattr(importlib.import_module(module), name)(Sizes())
    generator = torch.Generator().manual_seed(0)
    for key, parameter in experts.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in key else 0.0, 0.1, generator)
    return nn.ModuleDict({"experts": experts.bfloat16()})


def results(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """y and all gradients."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, TOP_K, generator=generator).to(dtype).requires_grad_()
    y = model["experts"](x, chosen, weights)
    y.backward(torch.randn(y.shape, generator=generator).to(dtype))
    of_parameters = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, "d routing": weights.grad, **of_parameters}  # type: ignore[dict-item]


def relative(actual: Tensor, right: Tensor) -> float:
    return float((actual.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize("name", [name if name in SEVERAL else pytest.param(name, marks=thorough) for name in CLASSES])
def test_every_class(name: str) -> None:
    model = made(CLASSES[name], name)
    right = results(copy.deepcopy(model).double(), torch.float64)
    convert_module(model, recipe="tensorwise", first_last_layers_bf16=False)
    assert isinstance(model["experts"], Experts)  # type: ignore[index]
    rows = conversion_summary(model).layers
    assert {row.name.removeprefix("experts.") for row in rows if row.fp8} == {
        key
        for key, parameter in model["experts"].named_parameters()
        if parameter.dim() == 3  # type: ignore[index]
    }
    found = results(model, torch.bfloat16)
    assert found.keys() == right.keys()
    for key, value in found.items():
        least = 0.0 if key.endswith("down_proj_bias") else 0.004  # that BF16 alone is nearer shows that FP8 ran
        assert least < relative(value, right[key]) < 0.16, key


def converted(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, nn.Module]:
    """Experts in FP8, and the same ones in float64."""
    model = made(CLASSES[name], name).to(dtype)
    right = copy.deepcopy(model).double()
    convert_module(model, recipe="rowwise", first_last_layers_bf16=False)
    return model["experts"], right["experts"]  # type: ignore[index]


def test_gradients_of_biases_add_many_rows_up() -> None:
    """A sum in BF16 stays at the first power of two whose last place is larger than what is added."""
    experts, right = converted("GptOssExperts")
    x, chosen = torch.randn(2048, HIDDEN).bfloat16(), torch.arange(2048 * TOP_K).view(-1, TOP_K) % EXPERTS
    routing, dy = torch.rand(chosen.shape), torch.rand(x.shape).bfloat16() + 0.5
    experts(x, chosen, routing).backward(dy)
    right(x.double(), chosen, routing.double()).backward(dy.double())
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        assert relative(getattr(experts, name).grad, getattr(right, name).grad) < 0.06, name


@pytest.mark.parametrize(
    ("name", "index", "weights"),
    [("MixtralExperts", "top_k_index", "top_k_weights"), ("GptOssExperts", "router_indices", "routing_weights")],
)
def test_routing_by_name_in_any_order(name: str, index: str, weights: str) -> None:
    experts, right = converted(name)
    x, chosen = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.randint(EXPERTS, (TOKENS, TOP_K))
    routing = torch.rand(chosen.shape)
    y = experts(x, **{weights: routing, index: chosen})
    assert relative(y, right(x.double(), **{weights: routing.double(), index: chosen})) < 0.16
    assert torch.equal(y, experts(x, chosen, routing))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_of_results_under_autocast_is_that_of_the_tokens(dtype: torch.dtype) -> None:
    experts, right = converted("MixtralExperts", torch.float32)
    x, chosen = torch.randn(TOKENS, HIDDEN).to(dtype), torch.randint(EXPERTS, (TOKENS, TOP_K))
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, chosen, torch.rand(chosen.shape))
        assert y.dtype is right.float()(x, chosen, torch.rand(chosen.shape)).dtype is dtype
    assert dtype is torch.bfloat16 or not torch.equal(y, y.bfloat16())  # not rounded after the sum


@pytest.mark.parametrize("count", [EXPERTS, MANY_EXPERTS + 8])
def test_a_gate_that_computes_in_float32(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As activations may under torch.autocast."""
    monkeypatch.setattr(f"{__name__}.EXPERTS", count)
    experts, right = converted("MixtralExperts")
    gate = experts._apply_gate
    experts._apply_gate = lambda hidden: gate(hidden.float())  # type: ignore[assignment,operator]
    x, chosen = torch.randn(4 * TOKENS, HIDDEN).bfloat16(), torch.randint(count, (4 * TOKENS, TOP_K))
    routing = torch.rand(chosen.shape)
    experts(x, chosen, routing).sum().backward()
    right(x.double(), chosen, routing.double()).sum().backward()
    for (name, found), expected in zip(experts.named_parameters(), right.parameters()):
        assert relative(found.grad, expected.grad) < 0.16, name  # type: ignore[arg-type]


@pytest.mark.parametrize("module", NOT_DECORATED)
def test_others_are_named(module: str) -> None:
    name = NOT_DECORATED[module]
    model = made(module, name)
    convert_module(model, recipe="tensorwise", first_last_layers_bf16=False)
    rows = conversion_summary(model).layers
    assert not any(row.fp8 for row in rows)
    assert all(name in row.reason for row in rows)


@pytest.mark.skipif(not transformers.__version__.startswith("5.24."), reason="the page is about version 5.24")
def test_the_page_names_every_class() -> None:
    page = (Path(__file__).parents[2] / "docs/experts.md").read_text()
    quoted = " ".join(line.removeprefix("> ") for line in page.splitlines() if line.startswith("> "))
    assert {f"{name}Experts" for name in quoted.split(", ")} == CLASSES.keys()


# --- Whole models -----------------------------------------------------------------------------------------------------

BOTH = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 1, "moe_intermediate_size": 48, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
}  # fmt: skip
SPARSE = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8},
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    "Qwen2Moe": {**SPARSE, "shared_expert_intermediate_size": 64},
    "Qwen3Moe": {**SPARSE, "head_dim": 16},
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT,
    "Olmoe": SPARSE,
    "Glm4Moe": {**SPARSE, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
                "head_dim": 16},
}  # fmt: skip


@thorough
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_train(family: str, recipe: str) -> None:
    """Two steps of AdamW: losses near BF16's, and the experts of all but the first and the last block ran in FP8."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**BOTH, **FAMILIES[family]})
    plain = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16().train()
    model = convert_module(copy.deepcopy(plain), recipe=recipe)
    ids = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(1))

    def losses(model: Any) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = []
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    assert losses(model) == pytest.approx(losses(plain), rel=0.01)
    ran = {row.name for row in conversion_summary(model).layers if row.fp8 and "experts." in row.name}
    assert {
        f"model.layers.{block}.mlp.experts.{each}" for block in (1, 2) for each in ("gate_up_proj", "down_proj")
    } <= ran
    assert not any(
        "layers.0" in name or "layers.3" in name or "router" in name or name.endswith("gate") for name in ran
    )
    assert {type(each).__mro__[1] for each in model.modules() if isinstance(each, Experts)} == {Experts}
    assert all(each.record.fp8 for each in model.modules() if isinstance(each, Experts) and each.fp8)
