"""``fuse=True``: RMSNorms take one kernel each way, gated MLPs are one autograd function, and the model stays itself.

MLPs alone: ``test_fuse_mlp.py``; what the table says: ``test_what_cast.py``.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import FP8Precision, Linear, convert_module, fp8_autocast, fp8_state_dict, load_fp8_state_dict
from lightning_fp8.convert.fused.norm import FusedNorm, _dtype_under_autocast, fuse_norm
from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.convert.policy import Policy
from tests.convert.fuse.runs import (
    FAMILIES,
    HIDDEN,
    INNER,
    TOKENS,
    Ops,
    assert_equal,
    causal_lm,
    converted,
    distance,
    error,
    llama,
    step,
    transformers,
)
from tests.tiers import thorough

DTYPES = [torch.bfloat16, torch.float32]
"""Of the weights; those in float32 run under autocast."""

RECIPES = ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"]

OF_EAGER = {"pow", "mean", "rsqrt", "silu", "silu_backward", "gelu", "gelu_backward", "rms_norm", "_fused_rms_norm"}
"""torch's ops of an RMSNorm and of a gated activation."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_op_of_torch_computes_a_norm_or_an_activation(family: str, dtype: torch.dtype) -> None:
    """Neither forward nor backward; and nothing of torch writes a tensor between gate, up and down."""
    exact = step(causal_lm(family, dtype=torch.float64), enabled=False)
    found = []
    for fuse in (False, True):
        model = converted(fuse, causal_lm(family, dtype=dtype))
        step(model)
        with Ops() as ops:
            found.append(step(model))
        assert bool(OF_EAGER & {*ops.of_torch}) != fuse, "the count counts"
    norms = sum(isinstance(module, FusedNorm) for module in model.modules())
    assert norms == sum(type(module).__name__.endswith("RMSNorm") for module in model.modules()) >= 5
    assert (ops.counts["rms_norm"], ops.counts["norm_backward"]) == (norms, norms)
    for ours in ("{}_quantize", "{}_backward_quantize"):  # the second one with gate and up in one layer
        assert sum(ops.counts[ours.format(name)] for name in ("gated", "activation")) == 2
    rows = TOKENS.numel()
    assert not {shape for shape in ops.shapes if shape[-1:] == (INNER,) and shape.numel() == rows * INNER}
    assert error(found[1], exact) < 1.15 * error(found[0], exact)
    assert distance(found[1][0], exact[0]) < 1.1 * distance(found[0][0], exact[0])


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.7), (torch.float32, 0.74)])
def test_a_block_launches_fewer_ops(dtype: torch.dtype, most: float) -> None:
    totals = []
    for fuse in (False, True):
        model = converted(fuse, llama(1, dtype))
        x = torch.randn(2, 24, HIDDEN, dtype=dtype).requires_grad_()
        positions = model.model.rotary_emb(x, torch.arange(24)[None])
        for _ in range(2):
            model.zero_grad()
            x.grad = None
            with Ops() as ops, torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32), fp8_autocast():
                y = model.model.layers[0](x, position_embeddings=positions, attention_mask=None)
            y = y[0] if isinstance(y, tuple) else y  # before transformers 4.54
            with ops:
                y.backward(x.detach())
        totals.append(ops.total)
    assert totals[1] <= most * totals[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_gradient_is_as_near_as_without(recipe: str, dtype: torch.dtype) -> None:
    """To those in float64; and amaxes, after steps of an optimizer."""
    exact = step(llama(dtype=torch.float64), enabled=False)
    models = converted(False, llama(dtype=dtype)), converted(True, llama(dtype=dtype))
    unfused, fused = (step(model, recipe) for model in models)
    for name, one, other, right in zip(["logits", *dict(models[0].named_parameters())], fused, unfused, exact):
        assert distance(one, right) < 1.35 * distance(other, right) + 1e-3, name
    assert error(fused, exact) < 1.1 * error(unfused, exact)
    if recipe == "delayed":
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            optimizer.step()
            step(model)
            optimizer.step()
        one, other = (fp8_state_dict(model) for model in models)
        assert one["names"] == other["names"]
        assert bool((one["amax_history"][-2:] > 0).all())
        torch.testing.assert_close(one["amax_history"], other["amax_history"], rtol=0.2, atol=0.0)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2", "helium", "torch", "torch without eps"])
@pytest.mark.filterwarnings("ignore:fp8_autocast ran nothing", "ignore:Mismatch dtype")
def test_a_norm_is_the_models_own(family: str, weight_dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    """Its dtype, its bits up to the last, and its gradients in float64."""
    torch.manual_seed(0)
    if family.startswith("torch"):
        norm: Any = nn.RMSNorm(HIDDEN, eps=1e-3 if family == "torch" else None)
    else:
        norm = causal_lm(family, 1).model.norm
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.3)
    norm.to(weight_dtype)
    x = (1e-2 * torch.randn(5, 7, HIDDEN)).to(x_dtype).requires_grad_()  # eps counts
    own = norm(x)
    exact_norm, exact_x = copy.deepcopy(norm).double(), x.detach().double().requires_grad_()
    if family == "torch without eps":
        exact_norm.eps = torch.finfo(torch.float32).eps  # of the dtype that it computes in
    exact = exact_norm(exact_x)
    fuse_norm(norm)
    assert_equal([norm(x)], [own])
    with fp8_autocast():
        y = norm(x)
    assert (y.dtype, norm.why_not) == (own.dtype, "")
    assert bool(((y.double() - own.double()).abs() <= 2.0**-7 * own.double().abs()).all())
    assert distance(y, exact) <= 1.05 * distance(own, exact) + 1e-6
    dy = torch.randn_like(own)
    y.backward(dy)
    exact.backward(dy.double())
    assert distance(x.grad, exact_x.grad) < (4e-3 if x_dtype is torch.bfloat16 else 1e-5)
    assert distance(norm.weight.grad, exact_norm.weight.grad) < (4e-3 if weight_dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3), (0, 1, 3, 2)])
def test_a_transposed_input_is_not_copied(order: tuple[int, ...]) -> None:
    """Gemma 3 transposes queries before their norm. The output has the strides of the model's own norm."""
    model = converted(True, causal_lm("gemma3", 1))
    norm = model.model.layers[0].self_attn.q_norm
    norm.weight.data.normal_(0.0, 0.3)
    x = torch.randn(2, 5, 16, 16, dtype=torch.bfloat16).permute(order)
    own, exact = norm(x), copy.deepcopy(norm).double()
    x, exact_x = x.requires_grad_(), x.detach().double().requires_grad_()
    with Ops() as ops, fp8_autocast():
        y = norm(x)
    assert norm.why_not == ""
    dy = torch.randn_like(y)
    if order[-1] == 3:
        assert y.stride() == own.stride()
        assert not ops.of_torch, "nothing but the norm's kernel"
    torch.testing.assert_close(y, own, rtol=2.0**-7, atol=0.0)
    y.backward(dy)
    exact(exact_x).backward(dy.double())
    assert distance(x.grad, exact_x.grad) < 4e-3
    assert distance(norm.weight.grad, exact.weight.grad) < 4e-3


def test_the_model_stays_itself() -> None:
    model = llama()
    norm, mlp = model.model.layers[0].input_layernorm, model.model.layers[0].mlp
    parameters, keys, classes = list(model.parameters()), list(model.state_dict()), (type(norm), type(mlp))
    convert_module(model, first_last_layers_bf16=False, fuse=True)
    assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in parameters]
    assert list(model.state_dict()) == keys
    assert isinstance(norm, classes[0])
    assert isinstance(mlp, classes[1])
    assert_equal(step(model, enabled=False), step(llama(), enabled=False))


def test_copies_and_pickles_are_fused() -> None:
    model = converted(True)
    step(model, "rowwise")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(other.model.norm) is type(model.model.norm)
        with Ops() as ops:
            assert_equal(step(other, "rowwise"), step(model, "rowwise"))
        assert ops.counts["rms_norm"] == 2 * 5
        assert ops.counts["gated_backward_quantize"] == 2 * 2


def test_rows_of_readers_are_fed_alike() -> None:
    model = converted(True)
    for _ in range(3):
        step(model)
    state = fp8_state_dict(model)
    of_attention, of_mlp = (f"self_attn.{name}_proj" for name in "qkv"), ("mlp.gate_proj", "mlp.up_proj")
    for readers in (of_attention, of_mlp):
        one, *others = (state["names"].index(f"model.layers.1.{name}.input") for name in readers)
        for other in others:
            assert state["seen"][one] == state["seen"][other] > 0
            assert torch.equal(state["amax_history"][:, one], state["amax_history"][:, other])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_bit(use_reentrant: bool, dtype: torch.dtype) -> None:
    models = converted(True, llama(dtype=dtype)), converted(True, llama(dtype=dtype))
    models[0].gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    models[0].enable_input_require_grads()
    for _ in range(2):
        assert_equal(*(step(model) for model in models))
    assert torch.equal(*(fp8_state_dict(model)["seen"] for model in models))


@thorough
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_blocks_observe_the_same(backend: str) -> None:
    models = converted(True), converted(True)
    for layer in models[1].model.layers:
        layer.compile(fullgraph=True, backend=backend)
    eager, compiled = (step(model) for model in models)
    assert error(compiled, eager) < 0.05
    torch.testing.assert_close(*(fp8_state_dict(model)["seen"] for model in models), rtol=0.1, atol=0.0)


def test_micro_batches_with_kept_weights() -> None:
    """Weights are cast once for two micro-batches, and no bit changes."""
    found, casts = [], []
    for cache in (False, True):
        model = llama()
        plugin = FP8Precision(fuse=True, first_last_layers_bf16=False, cache_fp8_weights=cache)
        plugin.convert_module(model)
        with Ops() as ops:
            for tokens in TOKENS.split(1):
                with plugin.forward_context():
                    loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
        casts.append(ops.counts["quantize"])
    assert_equal(*found)
    assert casts[0] - casts[1] == 14 * 3  # forward and backward of two, instead of one cast


def test_resumes_to_the_bit() -> None:
    """From a model's state and that of its scales. The former has the model's own keys."""

    def train(model: Any, steps: int) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(steps):
            step(model)
            optimizer.step()
        return model

    straight, half, resumed = train(converted(True), 4), train(converted(True), 2), converted(True)
    assert [*half.state_dict()] == [*llama().state_dict()]
    resumed.load_state_dict(half.state_dict())
    load_fp8_state_dict(resumed, fp8_state_dict(half))
    assert_equal([*straight.parameters()], [*train(resumed, 2).parameters()])


def test_calibration_runs_the_models_own() -> None:
    model = converted(True)
    with Ops() as ops, fp8_autocast(enabled=False, calibrating=True):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert not ops.counts["rms_norm"] + ops.counts["gated_quantize"]
    assert bool((fp8_state_dict(model)["scale"] > 0).all())


def doubled(norm: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.mul_(2)


def read(norm: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


@pytest.mark.parametrize("hook", [doubled, read])
def test_a_hook_of_a_norm_gets_a_tensor(hook: Any) -> None:
    models = converted(True), converted(False)
    for model in models:
        for layer in model.model.layers:
            layer.mlp.act_fn.register_forward_hook(lambda *args: None)  # MLPs are the model's own
            layer.input_layernorm.register_forward_hook(hook)
    with Ops() as ops:
        fused, unfused = (step(model, "rowwise") for model in models)
    assert ops.counts["rms_norm"] == 5
    assert distance(fused[0], unfused[0]) < 0.01


def test_evaluation_is_fused() -> None:
    model, plain = converted(True).eval(), converted(False).eval()
    outputs = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), fp8_autocast(fp8_recipe="rowwise"), Ops() as ops:
            outputs.append(model(input_ids=TOKENS).logits)
        assert (ops.counts["rms_norm"], ops.counts["gated_quantize"]) == (5, 2)
        with mode(), fp8_autocast(fp8_recipe="rowwise"):
            outputs.append(plain(input_ids=TOKENS).logits)
    assert torch.equal(outputs[0], outputs[2])
    assert distance(outputs[0], outputs[1]) < 0.05


def test_second_derivatives_are_refused() -> None:
    model = converted(True)
    with fp8_autocast(fp8_recipe="rowwise"):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
    with pytest.raises(RuntimeError, match="fuse=False"):
        torch.autograd.grad(loss, model.model.embed_tokens.weight, create_graph=True)


def test_the_table_says_what_is_fused_and_why_not() -> None:
    model = llama()
    model.model.layers[0].input_layernorm.forward = lambda x: x
    model.model.layers[1].input_layernorm = OtherRMSNorm(HIDDEN)
    summary = plan_conversion(model, Policy(first_last_layers_bf16=False, fuse=True)).summary
    assert {norm.name: norm.reason for norm in summary.norms} == {
        "model.layers.0.input_layernorm": "its forward was replaced on the instance",
        "model.layers.0.post_attention_layernorm": "in one kernel",
        "model.layers.1.input_layernorm": f"fuse=True does not support {__name__}.OtherRMSNorm",
        "model.layers.1.post_attention_layernorm": "in one kernel",
        "model.norm": "in one kernel",
    }
    assert {norm.precision for norm in summary.norms} == {"BF16"}
    assert "in one kernel" in str(summary)
    nothing = plan_conversion(llama(), Policy(skip=("*",), fuse=True)).summary
    assert {norm.reason for norm in nothing.norms} == {"no layer runs in FP8"}
    assert not plan_conversion(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), Policy(fuse=True)).summary.norms
    assert not plan_conversion(llama(), Policy(fuse=False)).summary.norms


class OtherRMSNorm(nn.RMSNorm):
    """Not the formula of its base class, whose name it has."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_conversions_leave_nothing_behind() -> None:
    """Neither many of one model, nor those of classes that are made on the fly."""
    model = converted(True)
    norm = model.model.layers[0].input_layernorm
    classes = type(norm).__mro__
    for _ in range(20):
        converted(True, model)
    assert type(norm).__mro__ == classes
    assert type(model.model.layers[1].input_layernorm) is type(norm)
    own = llama(1)
    norm = own.model.layers[0].input_layernorm
    norm.__class__ = type("Made", (type(norm),), {"__module__": type(norm).__module__})
    made = weakref.ref(type(norm))
    converted(True, own)
    assert isinstance(norm, FusedNorm)
    del own, norm
    gc.collect()
    assert made() is None


def test_text_parts_of_vision_models_are_known() -> None:
    for path in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        found = pytest.importorskip(f"transformers.models.{path}.modeling_{path}")
        config = transformers.Qwen2Config(hidden_size=64, intermediate_size=96)
        names = {"qwen2_vl": "Qwen2", "qwen2_5_vl": "Qwen2", "qwen3_vl": "Qwen3VLText"}[path]
        norm = getattr(found, f"{names}RMSNorm", getattr(found, "Qwen2_5_VLRMSNorm", None))
        mlp = getattr(found, f"{names}MLP")
        if norm is None:
            continue  # this transformers has it elsewhere
        plan = plan_conversion(nn.ModuleDict({"mlp": mlp(config), "norm": norm(64)}), Policy(False, fuse=True)).summary
        assert [row.fp8 for row in (*plan.mlps, *plan.norms)] == [True, True], path


def test_the_plugin_fuses_too() -> None:
    model = llama(3)
    FP8Precision(fuse=True).convert_module(model)
    assert sum(isinstance(module, FusedNorm) for module in model.modules()) == 2 * 3 + 1


class OfLiger(nn.Module):
    """A module of Liger-Kernel, of which a script has an instance beside its model."""

    __module__ = "liger_kernel.transformers.cross_entropy"


class Nameless:
    def __call__(self, x: Tensor) -> Tensor:
        return x


class Odd(nn.Module):
    forward = Nameless()  # has no __qualname__

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))


loss = OfLiger()


def test_a_model_beside_objects_and_forwards_without_a_name_is_converted() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), Odd())
    assert type(convert_module(model)[4]) is Odd  # type: ignore[index]


@pytest.fixture
def autocast_as_on_cuda() -> Iterator[None]:
    """CPU's autocast computes RMSNorms in float32, as CUDA's does."""
    library = torch.library.Library("aten", "IMPL")

    def in_float32(x: Tensor, shape: list[int], weight: Tensor, eps: float | None = None) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.ops.aten.rms_norm(x.float(), shape, weight.float(), eps)

    library.impl("rms_norm", in_float32, "AutocastCPU")
    _dtype_under_autocast.cache_clear()
    yield
    library._destroy()
    _dtype_under_autocast.cache_clear()


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.usefixtures("autocast_as_on_cuda")
@pytest.mark.filterwarnings("ignore:fp8_autocast ran nothing")
def test_the_dtype_under_autocast_is_torchs(weight_dtype: torch.dtype) -> None:
    norm, x = nn.RMSNorm(HIDDEN).to(weight_dtype), torch.randn(5, HIDDEN).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        own = norm(x)
        fuse_norm(norm)
        with fp8_autocast():
            y = norm(x)
    assert (y.dtype, own.dtype, norm.why_not) == (torch.float32, torch.float32, "")
    torch.testing.assert_close(y, own, rtol=1e-6, atol=1e-6)
    for each in (y, own):
        (gradient,) = torch.autograd.grad(each.square().sum(), x)
        torch.testing.assert_close(gradient.double(), _exact_gradient(x, norm.weight), rtol=1e-2, atol=1e-2)
    with fp8_autocast():
        assert norm(x).dtype is torch.bfloat16


def _exact_gradient(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.detach().double().requires_grad_()
    y = nn.functional.rms_norm(wide, (HIDDEN,), weight.detach().double(), torch.finfo(torch.float32).eps)
    return torch.autograd.grad(y.square().sum(), wide)[0]


def test_a_conversion_without_fuse_undoes_it() -> None:
    plain = converted(False)
    classes, attributes = [*map(type, plain.modules())], [{*vars(each)} for each in plain.modules()]
    model = converted(True)
    step(model)
    again = converted(False, model)
    assert not plan_conversion(again, Policy(fuse=False)).summary.norms
    assert [*map(type, again.modules())] == classes
    for each, kept in zip(again.modules(), attributes, strict=True):
        assert isinstance(each, Linear) or {*vars(each)} == kept, each
    assert_equal(step(again), step(converted(False)))
    assert_equal(step(converted(True, again)), step(converted(True)))


def test_an_input_that_changes_before_the_backward_is_told() -> None:
    for norm in (causal_lm("llama", 1).model.norm, nn.RMSNorm(HIDDEN).bfloat16()):
        fuse_norm(norm)
        r = torch.randn(5, HIDDEN).bfloat16().requires_grad_().clone()
        with fp8_autocast():
            h = norm(r)
        r += h
        with pytest.raises(RuntimeError, match=r"a fused norm was changed in place.*r = r \+ h.*fuse=False"):
            r.sum().backward()
        r = torch.randn(5, HIDDEN).bfloat16().requires_grad_()
        with fp8_autocast():
            y = norm(r).sum()
        y.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            y.backward()
