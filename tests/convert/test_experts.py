"""Experts in the table: which weights run in FP8, which are skipped, and what really ran."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import FP8State, convert_module, fp8_autocast, fp8_model_init
from lightning_fp8.convert.first_step import FirstStep, conversion_summary
from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.convert.policy import Policy
from lightning_fp8.convert.summary import EXPERTS, LayerDecision
from lightning_fp8.faster import is_slower
from lightning_fp8.functions.grouped import MANY_EXPERTS
from lightning_fp8.modules.experts import Experts
from lightning_fp8.numerics.recipes import make_recipe
from lightning_fp8.te_checkpoints.export import export_te_state_dict
from tests.convert.zoo import DECODER, hf, tokens

pytest.importorskip("transformers.integrations.moe")

GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
MANY = MANY_EXPERTS + 8


def mixtral(experts: int = 4, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    return hf("MixtralForCausalLM", "MixtralConfig", num_local_experts=experts, **DECODER, **more)()


def gpt_oss() -> nn.Module:
    torch.manual_seed(0)
    return hf("GptOssForCausalLM", "GptOssConfig", head_dim=8, num_local_experts=4, **DECODER)()


BATCH = tokens("input_ids", "labels")()


def step(model: nn.Module, enabled: bool = True, recipe: str = "rowwise") -> Tensor:
    """The loss of one step of an optimizer that changes nothing."""
    with fp8_autocast(enabled=enabled, fp8_recipe=recipe):
        loss: Tensor = model(**BATCH).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    return loss.detach()


def rows(model: nn.Module, **policy: object) -> dict[str, LayerDecision]:
    return {row.name: row for row in plan_conversion(model, Policy(**policy)).summary.layers}  # type: ignore[arg-type]


# --- The table --------------------------------------------------------------------------------------------------------


def test_a_line_for_each_weight_with_its_share() -> None:
    model = mixtral()
    summary = plan_conversion(model, Policy()).summary
    experts = {row.name: row for row in summary.layers if row.kind == EXPERTS}
    assert list(experts) == [
        f"model.layers.{i}.mlp.experts.{name}_proj" for i in range(3) for name in ("gate_up", "down")
    ]
    assert experts[GATE_UP].shape == (4, 128, 32)
    assert experts[DOWN].shape == (4, 32, 64)
    assert [name for name, row in experts.items() if row.fp8] == [GATE_UP, DOWN]
    matrices = sum(each.numel() for name, each in model.named_parameters() if each.dim() > 1 and "embed" not in name)
    text, share = summary.table(), 100 * 4 * 128 * 32 / matrices
    assert f"experts: {share:.3g} % of the parameters" in text
    assert f"{4 * (128 * 32 + 32 * 64) * 100 / matrices:.3g} %" in text  # of both in one line: the first layer's
    assert text.splitlines()[-2] == "4 of 13 linear layers and 2 of 6 weights of experts planned in FP8:"
    assert max(map(len, text.splitlines())) <= 80


SIZES: dict[str, tuple[str, dict[str, Any], float]] = {
    "Mixtral-8x7B": ("MixtralConfig", {}, 0.93),
    "Qwen3-30B-A3B": (
        "Qwen3MoeConfig",
        {
            "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "vocab_size": 151936,
        },
        0.94,
    ),
    "DeepSeek-V3": ("DeepseekV3Config", {}, 0.97),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_real_sizes(name: str) -> None:
    transformers = importlib.import_module("transformers")
    config, options, least = SIZES[name]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**options))
    summary = plan_conversion(model, Policy()).summary
    share = summary.share_of_parameters
    assert share is not None
    assert share > least
    text = summary.table()
    assert max(map(len, text.splitlines())) <= 80
    assert "experts.gate_up_proj" in text  # a line each, with its shape, whether the lines have notes or not
    assert "experts.down_proj" in text
    many = name != "Mixtral-8x7B"
    assert ("wgrad in high precision: more than 32 experts" in text) is many


def test_wgrad_of_many_experts_is_noted_where_it_is_in_high_precision() -> None:
    """The note says what the function does: the number of local experts decides."""
    few, many = (rows(mixtral(experts)) for experts in (MANY_EXPERTS, MANY))
    assert few[GATE_UP].reason == ""
    assert many[GATE_UP].reason == many[DOWN].reason == f"wgrad in high precision: more than {MANY_EXPERTS} experts"
    assert many["model.layers.0.mlp.experts.down_proj"].reason == "in layer 0 of 3, one of the first 1"
    assert many[GATE_UP].fp8


def test_routers_stay_in_high_precision() -> None:
    found = rows(gpt_oss(), first_last_layers_bf16=False)
    assert {name: row.kind for name, row in found.items() if "router" in name} == {
        f"model.layers.{index}.mlp.router.weight": "parameter" for index in range(3)
    }
    assert not any(row.fp8 for name, row in found.items() if "router" in name)
    assert found["model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 128, 32)  # out × in; stored [4, 32, 128]
    assert found["model.layers.1.mlp.experts.gate_up_proj"].fp8


class GroupedExperts(nn.Module):
    """torchtitan's: three 3-D parameters, and a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w1_EFD, self.w3_EFD = (nn.Parameter(torch.randn(4, 64, 32)) for _ in range(2))
        self.w2_EDF = nn.Parameter(torch.randn(4, 32, 64))


class DbrxExpertGLU(nn.Module):
    """DBRX's: the experts' matrices below each other in one 2-D parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4 * 64, 32))


def llama4() -> nn.Module:
    from transformers.models.llama4.modeling_llama4 import Llama4TextConfig, Llama4TextExperts

    made: nn.Module = Llama4TextExperts(Llama4TextConfig(hidden_size=32, intermediate_size=64, num_local_experts=4))
    return made


@pytest.mark.parametrize("make", [GroupedExperts, DbrxExpertGLU, llama4])
def test_other_experts_are_named_with_the_reason_and_a_way_out(make: Callable[[], nn.Module]) -> None:
    experts = make()
    name = type(experts).__name__
    found = rows(nn.ModuleDict({"experts": experts}))
    assert [*found] == [f"experts.{each}" for each, _ in experts.named_parameters()]
    for row in found.values():
        assert (row.kind, row.fp8) == (EXPERTS, False)
        assert row.reason.startswith(f"a parameter of {name}, experts with a forward of their own; FP8 runs ")
        assert row.reason.endswith("experts with an nn.Linear for each matrix")
    with pytest.warns(UserWarning, match="experts with a forward of their own"):
        convert_module(nn.ModuleDict({"experts": experts}))


# --- Skip -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("glob", ["*.experts", "*.experts.down_proj", "*.1.mlp.experts.gate_up_proj"])
def test_skip_keeps_both_weights_and_says_so_in_both_rows(glob: str) -> None:
    model = mixtral()
    convert_module(model, skip=[glob])
    found = {row.name: row for row in conversion_summary(model).layers}
    assert found[GATE_UP].reason == found[DOWN].reason == f"skip={glob!r}"
    assert not found[GATE_UP].fp8
    assert not found[DOWN].fp8
    assert not isinstance(model.get_submodule("model.layers.1.mlp.experts"), Experts)
    convert_module(model)  # a later conversion decides anew
    assert conversion_summary(model).num_fp8 == 6
    convert_module(model, skip=[glob])
    assert conversion_summary(model).num_fp8 == 4
    step(model)
    assert conversion_summary(model).verdict().startswith("4 of 13 linear layers and 0 of 6 weights of experts ran")


def test_skip_by_a_function() -> None:
    found = rows(mixtral(), skip=lambda module, name: type(module).__name__ == "MixtralExperts")
    assert not found[GATE_UP].fp8
    assert found["model.layers.1.self_attn.q_proj"].fp8


def test_a_glob_of_no_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"near it are '.*experts\.down_proj'"):
        convert_module(mixtral(), skip=["model.layers.1.mlp.experts.down_prj"])


def test_replace_layers_false_keeps_the_models_own() -> None:
    found = rows(mixtral(), replace_layers=False)
    assert found[GATE_UP].reason == "replace_layers=False keeps transformers's MixtralExperts"
    model = mixtral()
    with pytest.warns(UserWarning, match="replace_layers=False"):
        convert_module(model, replace_layers=False)
    assert not any(isinstance(module, Experts) for module in model.modules())


# --- What ran ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_first_step_says_that_experts_ran(checkpointing: bool) -> None:
    model = convert_module(mixtral())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        model.train()
    step(model)
    summary = conversion_summary(model)
    assert summary.verdict().startswith("4 of 13 linear layers and 2 of 6 weights of experts ran in FP8: ")
    assert [row.name for row in summary.layers if row.ran and row.kind == EXPERTS] == [GATE_UP, DOWN]
    assert not summary.idle


def test_experts_that_another_implementation_bypasses_are_idle() -> None:
    """By a forward on the instance, as kernels of others are put there, and by a block that reads the weights."""
    replaced, reads = convert_module(mixtral(5)), convert_module(mixtral(5))  # a size that no test compiles
    experts: Any = replaced.get_submodule("model.layers.1.mlp.experts")
    experts.forward = lambda x, *_: x * experts.gate_up_proj.mean()
    block: Any = reads.get_submodule("model.layers.1.mlp")
    block.forward = MethodType(lambda self, x: x * self.experts.down_proj.mean(), block)
    for model, reason in (
        (replaced, "its forward was replaced on the instance and does not call ours"),
        (reads, "MixtralSparseMoeBlock read its weight and did not call it in the first training step"),
    ):
        with pytest.warns(UserWarning, match=f"{GATE_UP}, {DOWN}: {reason}"):
            step(model)
        summary = conversion_summary(model)
        assert {row.name: row.reason for row in summary.idle} == {GATE_UP: reason, DOWN: reason}
        assert "0 of 6 weights of experts ran" in summary.verdict()


def test_a_forward_that_may_not_call_ours_is_not_planned() -> None:
    model = mixtral()
    model.get_submodule("model.layers.1.mlp.experts").forward = lambda x, *_: x  # type: ignore[method-assign]
    row = rows(model)[GATE_UP]
    assert row.reason == "its forward was replaced on the instance, by something that may not call ours"


def test_many_experts_stay_in_high_precision_where_they_would_be_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided at the first optimizer step by the kind of the GPU, told once, and not with ``where_faster=False``."""
    experts: Any = convert_module(mixtral(MANY)).get_submodule("model.layers.1.mlp.experts")
    few: Any = convert_module(mixtral()).get_submodule("model.layers.1.mlp.experts")
    with fp8_model_init():
        kept: Any = convert_module(mixtral(MANY)).get_submodule("model.layers.1.mlp.experts")
    monkeypatch.setattr("lightning_fp8.faster.name_of", lambda device: "a GPU")
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    for capability, recipe, slower in (
        ((9, 0), "rowwise", False), ((9, 0), "mxfp8", True), ((8, 9), "delayed", True), ((12, 0), "blockwise", True),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        context: Any = SimpleNamespace(recipe=make_recipe(recipe))
        said = f"BF16 is faster than a loop over {MANY} experts ({recipe}, a GPU)"
        assert experts._compared(on_gpu, context) == slower * said
        assert few._compared(on_gpu, context) == experts._compared(torch.ones(2, 32), context) == ""
        assert kept._compared(on_gpu, context) == ""
    assert is_slower(said)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for variable, value in (("LIGHTNING_FP8_GEMM", "cublaslt"), ("LIGHTNING_FP8_KERNELS", "off")):
        with monkeypatch.context() as patched:
            assert experts._compared(on_gpu, context) == ""
            patched.setenv(variable, value)
            assert experts._compared(on_gpu, context) == said
    monkeypatch.setattr(Experts, "_compared", lambda self, input, context: said)
    model, all_in_fp8 = convert_module(mixtral(MANY)), convert_module(mixtral(MANY), where_faster=False)
    with pytest.warns(UserWarning, match=rf"1 layers stay.*loop over {MANY} experts.*where_faster=False"):
        step(model)
    step(model)
    found = {row.name: row for row in conversion_summary(model).layers}
    assert found[GATE_UP].precision == found[DOWN].precision == "BF16"
    assert found[GATE_UP].reason == said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(all_in_fp8)
    assert conversion_summary(all_in_fp8).num_fp8 == 6


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_experts_that_a_saved_state_lacks_are_compared(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a run whose experts were in BF16 decides for its own layers, and leaves experts open."""
    said = f"BF16 is faster than a loop over {MANY} experts"
    monkeypatch.setattr(Experts, "_compared", lambda self, input, context: said)
    saved, resumed = (convert_module(mixtral(MANY), skip=skip) for skip in (("*.experts",), ()))
    step(saved, recipe=recipe)
    with pytest.warns(
        UserWarning, match=rf"lacks 6 tensors, {DOWN[:-9]}\w+.\w+ for example, which start without scales"
    ):
        FP8State(resumed).load_state_dict(FP8State(saved).state_dict())
    with pytest.warns(UserWarning, match=r"1 layers stay"):
        step(resumed, recipe=recipe)
    assert resumed.get_submodule("model.layers.1.mlp.experts").slower == said
    again = convert_module(mixtral(MANY))
    FP8State(again).load_state_dict(FP8State(resumed).state_dict())
    assert again.get_submodule("model.layers.1.mlp.experts").slower == said


@pytest.mark.parametrize("number", [4, MANY])
def test_flops_of_experts_do_not_depend_on_where_they_run(number: int) -> None:
    """By hand: three products of each weight with two rows of each token; wgrad of many experts is not in FP8."""
    found = []
    for skip in ((), ("*.experts",)):
        model = mixtral(number).bfloat16()
        watched = convert_module(model, skip=skip)
        plan = plan_conversion(model, Policy(skip=skip))
        first = FirstStep(watched, plan)
        with fp8_autocast(fp8_recipe="rowwise"), first.counted():
            model(**BATCH).loss.backward()
        found.append(first.finish())
    in_fp8, in_bf16 = found
    products = 2 * 2 * BATCH["input_ids"].numel() * (128 * 32 + 32 * 64)
    assert in_fp8.flops == in_bf16.flops
    assert in_fp8.flops_in_fp8 - in_bf16.flops_in_fp8 == (2 if number > MANY_EXPERTS else 3) * products


# --- Forwards of others -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_the_models_implementation_runs_outside_fp8_and_plays_no_role_in_it(implementation: str) -> None:
    model = mixtral()
    model.set_experts_implementation(implementation)  # type: ignore[operator]
    converted = convert_module(copy.deepcopy(model))
    own, found = step(model, enabled=False), step(converted, enabled=False)
    assert torch.equal(found, own)
    for (name, mine), theirs in zip(converted.named_parameters(), model.parameters()):
        assert torch.equal(mine.grad, theirs.grad), name  # type: ignore[arg-type]
    in_fp8 = step(converted)
    assert torch.equal(in_fp8, step(convert_module(mixtral())))
    assert converted.config._experts_implementation == implementation  # type: ignore[union-attr]


def test_a_registered_implementation_is_not_called_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = importlib.import_module("transformers.integrations.moe")
    calls: list[str] = []

    def foreign(self: Any, hidden_states: Tensor, *routing: Tensor) -> Tensor:
        calls.append(type(self).__name__)
        return hidden_states * self.gate_up_proj.mean()

    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, "foreign", foreign)
    model = mixtral()
    model.config._experts_implementation = "foreign"  # type: ignore[union-attr]
    step(convert_module(model, first_last_layers_bf16=False))
    assert calls == []
    assert conversion_summary(model).verdict().startswith("12 of 13 linear layers and 6 of 6 weights of experts ran")
    step(model, enabled=False)
    assert len(calls) == 3


class InAnObject:
    """Keeps the forward of experts as transformers' expert parallelism does."""

    def __init__(self, experts: nn.Module) -> None:
        self.experts_forward = experts.forward

    def __call__(self, *args: Any) -> Any:
        return self.experts_forward(*args)


def in_an_object(experts: nn.Module) -> None:
    implementation = InAnObject(experts)

    def ep_forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        return implementation(hidden_states, top_k_index, top_k_weights)

    experts.forward = ep_forward  # type: ignore[method-assign]


def in_a_closure(experts: nn.Module) -> None:
    original = experts.forward
    experts.forward = lambda *args: original(*args)  # type: ignore[method-assign]


def by_accelerate(experts: nn.Module) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(experts, hooks.ModelHook())
    in_an_object(experts)


@pytest.mark.parametrize("keep", [in_an_object, in_a_closure, by_accelerate])
def test_experts_run_behind_a_kept_forward(keep: Callable[[nn.Module], None]) -> None:
    model = mixtral()
    plain = step(convert_module(copy.deepcopy(model)))
    keep(model.get_submodule("model.layers.1.mlp.experts"))
    convert_module(model)
    assert torch.equal(step(model), plain)
    assert [row.name for row in conversion_summary(model).layers if row.ran and row.kind == EXPERTS] == [GATE_UP, DOWN]


def test_litgpts_experts_are_linear_layers() -> None:
    """A ModuleList of nn.Linear: each is converted, and one that gets no token is idle only while it gets none."""

    class LLaMAMoE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(32, 4, bias=False)
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    found = rows(nn.ModuleList(LLaMAMoE() for _ in range(3)))
    assert [name for name, row in found.items() if row.fp8] == ["1.gate", *(f"1.experts.{index}" for index in range(4))]


# --- Transformer Engine's checkpoints ---------------------------------------------------------------------------------


def test_transformer_engine_has_no_such_module() -> None:
    model = convert_module(mixtral())
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts: Transformer Engine has no module .* one for each"):
        export_te_state_dict(model, "2.4.0")
    assert export_te_state_dict(convert_module(mixtral(), skip=["*.experts"]), "2.4.0")
