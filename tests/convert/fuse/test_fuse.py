"""``fuse=True``: norms of Hugging Face's Llama cast for the layers that read them, and are norms for all others.

MLPs of such models: ``tests/convert/fuse/test_fuse_mlp.py``.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fp8 import FP8Precision, convert_module, fp8_autocast, fp8_state_dict
from lightning_fp8.convert.conversion import plan_conversion
from lightning_fp8.convert.first_step import FirstStep, idle_layers
from lightning_fp8.convert.policy import Policy
from lightning_fp8.functions.deferred import DeferredTensor
from lightning_fp8.hf_fusion.deferred_norm import NormOutput
from lightning_fp8.hf_fusion.norm import KNOWN, CastingNorm, is_known_norm

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(48).view(2, 24) % 37


class Ops(TorchDispatchMode):
    """Counts our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "lightning_fp8":
            self.counts[function.name().removeprefix("lightning_fp8::").removesuffix("_unobserved")] += 1
        return function(*args, **(kwargs or {}))


def llama(layers: int = 2, dtype: torch.dtype = torch.bfloat16) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
    return model.to(dtype)


def converted(fuse: bool, **options: Any) -> Any:
    return convert_module(llama(), first_last_layers_bf16=False, fuse=fuse, **options)


def step(model: Any, recipe: Any = "delayed", enabled: bool = True) -> list[Tensor]:
    """The logits and all gradients of one training step."""
    model.zero_grad()
    with fp8_autocast(enabled, fp8_recipe=recipe):
        output = model(input_ids=TOKENS, labels=TOKENS)
    output.loss.backward()
    return [output.logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The relative error of all gradients together."""
    difference = sum(float((one.double() - two.double()).square().sum()) for one, two in zip(found[1:], exact[1:]))
    return float((difference / sum(float(two.double().square().sum()) for two in exact[1:])) ** 0.5)


def assert_equal(first: list[Tensor], second: list[Tensor]) -> None:
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "blockwise", "mxfp8"])
def test_a_norm_casts_for_its_readers(recipe: str) -> None:
    """One pass for q, k and v, one for gate and up, one for down and one for each of their gradients."""
    exact = step(llama(dtype=torch.float64), enabled=False)
    model = converted(True)
    with Ops() as ops:
        fused = [step(model, recipe) for _ in range(2)][-1]
    plain = converted(False)
    unfused = [step(plain, recipe) for _ in range(2)][-1]
    assert (ops.counts["norm_quantize"], ops.counts["norm_backward"]) == (2 * 4, 2 * 4)
    assert (ops.counts["gated_quantize"], ops.counts["gated_backward_quantize"]) == (2 * 2 * 2, 2 * 2)
    casts_of_a_block = 1 + 2 * 7 + 5  # o's input, weights forward and backward, gradients of all but gate and up
    assert ops.counts["quantize"] == 2 * 2 * casts_of_a_block
    assert error(fused, exact) < 1.15 * error(unfused, exact)
    torch.testing.assert_close(fused[0], unfused[0], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_no_layer_reads_values(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither forward nor backward: the layers read copies, and who computes the values computes the norm twice."""
    models, computed, compute = (converted(True), converted(False)), Counter[str](), DeferredTensor.computed

    def counting(self: DeferredTensor) -> Tensor:
        computed[type(self).__name__] += 1
        return compute(self)

    monkeypatch.setattr(DeferredTensor, "computed", counting)
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in models]
    for _ in range(3):
        fused, unfused = (step(model, recipe) for model in models)
        torch.testing.assert_close(fused[0], unfused[0], rtol=0.1, atol=0.1)
        for optimizer in optimizers:
            optimizer.step()
    if recipe == "delayed":
        histories = [fp8_state_dict(model)["amax_history"] for model in models]
        torch.testing.assert_close(*histories, rtol=0.15, atol=0.0)
    models[0].gradient_checkpointing_enable({"use_reentrant": False})
    step(models[0], recipe)
    with torch.no_grad(), fp8_autocast(fp8_recipe=recipe):
        models[0].eval()(input_ids=TOKENS)
    assert not computed
    models[0].model.layers[0].input_layernorm.register_forward_hook(read)
    step(models[0], recipe)
    assert computed == {"NormOutput": 1}, "the count counts"


def test_the_model_stays_itself() -> None:
    model = llama()
    norm = model.model.layers[0].input_layernorm
    parameters, keys, cls = list(model.parameters()), list(model.state_dict()), type(norm)
    convert_module(model, first_last_layers_bf16=False, fuse=True)
    assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in parameters]
    assert list(model.state_dict()) == keys
    assert isinstance(norm, cls)
    assert_equal(step(model, enabled=False), step(llama(), enabled=False))
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copied, loaded):
        readers = other.model.layers[0].input_layernorm._readers
        assert readers[0] is other.model.layers[0].self_attn.q_proj
    assert_equal(step(model, "rowwise"), step(copied, "rowwise"))


def test_rows_of_readers_are_fed_alike() -> None:
    model = converted(True)
    for _ in range(3):
        step(model)
    state = fp8_state_dict(model)
    for reader in ("k_proj", "v_proj"):
        first, other = (state["names"].index(f"model.layers.1.self_attn.{name}.input") for name in ("q_proj", reader))
        assert state["seen"][first] == state["seen"][other] > 0
        assert torch.equal(state["amax_history"][:, first], state["amax_history"][:, other])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_bit(use_reentrant: bool) -> None:
    model, plain = converted(True), converted(True)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    for _ in range(2):
        assert_equal(step(model), step(plain))


def norms_alone(model: Any) -> Any:
    """``model``, whose MLPs are its own."""
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda *args: None)
    return model


def doubled(norm: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.mul_(2)


def read(norm: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


@pytest.mark.parametrize("hook", [doubled, read])
def test_whoever_else_reads_it_gets_the_norm(hook: Any) -> None:
    """The layers cast what they get, which is the same tensor then."""
    models = norms_alone(converted(True)), converted(False), llama(dtype=torch.float64)
    for each in models:
        for layer in each.model.layers:
            layer.input_layernorm.register_forward_hook(hook)
            layer.post_attention_layernorm.register_forward_hook(hook)
    fused, unfused, exact = (step(each, "rowwise", each is not models[2]) for each in models)
    assert torch.equal(fused[0], unfused[0])
    assert error(fused, exact) < 1.15 * error(unfused, exact)


def test_outputs_that_a_hook_kept() -> None:
    model, plain = converted(True), converted(False)
    kept: list[Tensor] = []
    for each in (model, plain):
        each.model.layers[0].input_layernorm.register_forward_hook(lambda *args: kept.append(args[-1].detach()))
        step(each)
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    assert torch.equal(*torch.load(file))
    assert torch.equal(*copy.deepcopy(kept))
    assert kept[0].tolist() == kept[1].tolist()


def test_an_output_is_not_computed_from_other_values() -> None:
    model, kept = converted(True), []
    norm = model.model.layers[0].input_layernorm
    norm.register_forward_hook(lambda *args: kept.append(args[-1].detach()))
    step(model)
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match="fuse=False"):
        kept[0].sum()


def test_under_autocast_and_in_inference_mode_it_is_the_norm() -> None:
    model, plain = converted(True).float(), converted(False).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(step(norms_alone(copy.deepcopy(model))), step(copy.deepcopy(plain)))
    with torch.inference_mode(), fp8_autocast(fp8_recipe="rowwise"):
        first, second = (each(input_ids=TOKENS).logits for each in (model, plain))
    assert torch.equal(first, second)


def test_evaluation_casts_rowwise_only() -> None:
    model = converted(True).eval()
    with torch.no_grad(), fp8_autocast(fp8_recipe="rowwise"), Ops() as ops:
        model(input_ids=TOKENS)
    assert ops.counts["norm_quantize"] == 2 * 2


def test_second_derivatives_are_refused() -> None:
    model = converted(True)
    with fp8_autocast(fp8_recipe="rowwise"):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
    with pytest.raises(RuntimeError, match="fuse=False"):
        torch.autograd.grad(loss, model.model.embed_tokens.weight, create_graph=True)


def test_the_table_says_what_casts_and_why_not() -> None:
    summary = plan_conversion(llama(3), Policy(num_layers_at_end_in_bf16=0, skip=("*.1.mlp.up_proj",), fuse=True))
    reasons = {norm.name: norm.reason for norm in summary.norms}
    assert reasons == {
        "model.layers.0.input_layernorm": "q_proj, which reads it, runs in BF16",
        "model.layers.0.post_attention_layernorm": "gate_proj, which reads it, runs in BF16",
        "model.layers.1.input_layernorm": "casts for q_proj, k_proj and v_proj",
        "model.layers.1.post_attention_layernorm": "up_proj, which reads it, runs in BF16",
        "model.layers.2.input_layernorm": "casts for q_proj, k_proj and v_proj",
        "model.layers.2.post_attention_layernorm": "casts for gate_proj and up_proj",
        "model.norm": "fuse=True does not know which layers read it",
    }
    assert [norm.name for norm in summary.norms if norm.fp8] == [
        name for name, reason in reasons.items() if reason.startswith("casts")
    ]
    assert "casts for gate_proj and up_proj" in str(summary)
    other = plan_conversion(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), Policy(fuse=True))
    assert [(norm.fp8, norm.reason) for norm in other.norms] == [(False, "fuse=True does not support LayerNorm")]
    assert not plan_conversion(llama(), Policy()).norms


def test_conversions_leave_nothing_behind() -> None:
    """Neither many of one model, nor those of classes that are made on the fly."""
    model = converted(True)
    norm = model.model.layers[0].input_layernorm
    classes, readers, hooks = type(norm).__mro__, norm._readers, len(norm._forward_hooks)
    for _ in range(20):
        convert_module(model, first_last_layers_bf16=False, fuse=True)
    assert (type(norm).__mro__, norm._readers, len(norm._forward_hooks)) == (classes, readers, hooks)
    assert type(model.model.layers[1].input_layernorm) is type(norm)
    own = llama(1)
    norm = own.model.layers[0].input_layernorm
    norm.__class__ = type("LlamaRMSNorm", (type(norm),), {"__module__": type(norm).__module__})
    made = weakref.ref(type(norm))
    convert_module(own, first_last_layers_bf16=False, fuse=True)
    assert isinstance(norm, CastingNorm)
    del own, norm
    gc.collect()
    assert made() is None


def test_a_class_of_the_same_name_is_told_apart() -> None:
    """Qwen2-VL has its own."""
    vl = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    config = transformers.Qwen2Config(hidden_size=16, intermediate_size=16)

    class Qwen2RMSNorm(nn.RMSNorm):
        pass

    model = nn.ModuleDict({"mlp": vl.Qwen2MLP(config), "norm": Qwen2RMSNorm(16)})
    plan = plan_conversion(model, Policy(fuse=True))
    assert [row.reason for row in (*plan.mlps, *plan.norms)] == [
        "fuse=True does not support transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2MLP",
        f"fuse=True does not support {__name__}.Qwen2RMSNorm",
    ]


def test_the_formula_is_that_of_every_known_class() -> None:
    """Older versions of transformers lack the newest models."""
    known = [(name, path) for name, path in KNOWN.items() if find_spec(path.rpartition(".")[0])]
    assert "LlamaRMSNorm" in dict(known)
    for name, path in known:
        norm = getattr(import_module(path), name)(32, eps=1e-3).bfloat16()
        assert is_known_norm(norm)
        with torch.no_grad():
            norm.weight.normal_()
            x = torch.randn(3, 32).bfloat16()
            assert torch.equal(NormOutput(x, norm.weight, norm.variance_epsilon) + 0, norm(x))


def test_the_plugin_fuses_too() -> None:
    model = llama(3)
    FP8Precision(fuse=True).convert_module(model)
    casting = [name for name, module in model.named_modules() if isinstance(module, CastingNorm)]
    assert casting == ["model.layers.1.input_layernorm", "model.layers.1.post_attention_layernorm"]


def test_the_table_says_that_norms_cast_nothing_under_autocast() -> None:
    for dtype, casts in ((torch.bfloat16, True), (torch.float32, False)):
        model = converted(True).to(dtype)
        plan = plan_conversion(model, Policy(first_last_layers_bf16=False, fuse=True))
        watch = FirstStep(model, plan)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not casts):
            step(model)
        found = watch.finish()
        precisions = {norm.precision for norm in found.norms if norm.fp8}
        assert precisions == {"FP8" if casts else "BF16"}
        sentences = list(idle_layers(found.idle))
        assert sentences == [] if casts else "without compute_dtype" in sentences[0]


def test_the_table_of_a_second_training_says_nothing_of_the_first() -> None:
    model = converted(True)
    plan = plan_conversion(model, Policy(first_last_layers_bf16=False, fuse=True))
    for autocast, precision in ((False, "FP8"), (True, "BF16"), (False, "FP8")):
        watch = FirstStep(model, plan)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            step(model)
        assert {norm.precision for norm in watch.finish().norms if norm.fp8} == {precision}
