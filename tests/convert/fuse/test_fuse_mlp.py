"""``fuse=True``: gated MLPs of Hugging Face's Llama and its like are one autograd function."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrize

from lightning_fp8 import Linear, fp8_autocast, fp8_model_init, fp8_state_dict
from lightning_fp8.convert.first_step import FirstStep
from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.convert.policy import Policy
from lightning_fp8.numerics.recipes import Float8CurrentScaling
from tests.convert.fuse.runs import HIDDEN, INNER, assert_equal, causal_lm, converted, distance, llama, step
from tests.tiers import thorough

RECIPES = ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"]


def of_mlp(mlp: nn.Module, x: Tensor, dy: Tensor, recipe: Any = "delayed") -> list[Tensor | None]:
    """The output and the gradients of a step of ``mlp`` alone."""
    x = x.detach().requires_grad_()
    mlp.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype is torch.float32), fp8_autocast(fp8_recipe=recipe):
        y = mlp(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(parameter.grad for parameter in mlp.parameters())]


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 12, HIDDEN, dtype=dtype), torch.randn(2, 12, HIDDEN, dtype=torch.bfloat16)


def mlps(family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, nn.Module]:
    """A fused MLP, and the same without ``fuse``."""
    fused, plain = (converted(fuse, causal_lm(family, 1, dtype)) for fuse in (True, False))
    return fused.model.layers[0].mlp, plain.model.layers[0].mlp


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_errors_are_those_of_three_layers(recipe: str, family: str, dtype: torch.dtype) -> None:
    fused, plain = mlps(family, dtype)
    x, dy = inputs(dtype)
    exact_mlp, exact_x = copy.deepcopy(causal_lm(family, 1).model.layers[0].mlp).double(), x.double().requires_grad_()
    y = exact_mlp(exact_x)
    y.backward(dy.double())
    exact = [y.detach(), exact_x.grad, *(parameter.grad for parameter in exact_mlp.parameters())]
    for one, other, right in zip(of_mlp(fused, x, dy, recipe), of_mlp(plain, x, dy, recipe), exact, strict=True):
        assert one is not None
        assert other is not None
        assert one.dtype is other.dtype
        assert distance(one, right) < 1.1 * distance(other, right)


def test_amaxes_are_those_of_the_exact_values() -> None:
    """Of down's input and of the gradients of gate and up, from what hooks of the same layers unfused see."""
    fused, plain = mlps()
    seen: dict[str, Tensor] = {}
    for name in ("gate_proj", "up_proj"):
        plain.get_submodule(name).register_forward_hook(lambda *args, name=name: seen.update({name: args[-1]}))

    def watch_gradient(layer: nn.Module, args: tuple[Tensor]) -> None:
        args[0].register_hook(lambda dy: seen.update(dy=dy))

    plain.get_submodule("down_proj").register_forward_pre_hook(watch_gradient)
    x, dy = inputs()
    of_mlp(fused, x, dy)
    of_mlp(plain, x, dy)
    gate, up = (seen[name].detach().double().requires_grad_() for name in ("gate_proj", "up_proj"))
    y = F.silu(gate) * up
    y.backward(seen["dy"].double())
    exact = {
        "gate_proj.input": x, "up_proj.input": x, "down_proj.input": y, "down_proj.grad_output": dy,
        "gate_proj.grad_output": gate.grad, "up_proj.grad_output": up.grad,
        **{f"{name}.weight": fused.get_submodule(name).weight for name in ("gate_proj", "up_proj", "down_proj")},
    }  # fmt: skip
    state = fp8_state_dict(fused)
    assert len(state["names"]) == len(exact)
    for row, value in exact.items():
        found = state["seen"][state["names"].index(row)]
        torch.testing.assert_close(found.double(), value.double().abs().max(), rtol=1e-5, atol=0.0)  # type: ignore[union-attr]


@pytest.mark.parametrize("trained", ["gate_proj", "up_proj", "down_proj", "x"])
def test_frozen_weights(trained: str) -> None:
    """The gradient that is asked for has the same bits, whatever else is."""
    found = []
    for only in (False, True):
        fused, _ = mlps()
        x, dy = inputs()
        x.requires_grad_(not only or trained == "x")
        for name, parameter in fused.named_parameters():
            parameter.requires_grad_(not only or name.startswith(trained))
        with fp8_autocast(fp8_recipe="tensorwise"):
            fused(x).backward(dy)
        found.append(x.grad if trained == "x" else fused.get_submodule(trained).weight.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("changed", ["gate_proj", "up_proj", "down_proj"])
def test_a_weight_that_no_gradient_reads_may_change(changed: str) -> None:
    """Between forward and backward, as with three layers, which keep a weight only for the gradient of their input."""
    found = []
    for mlp in mlps():
        mlp.requires_grad_(False)
        trained = [mlp.get_submodule("down_proj"), *[mlp.get_submodule("gate_proj")] * (changed == "up_proj")]
        for layer in trained:
            layer.requires_grad_()
        x, dy = inputs()
        with fp8_autocast(fp8_recipe="tensorwise"):
            y = mlp(x)
        with torch.no_grad():
            next(mlp.get_submodule(changed).parameters()).add_(1.0)
        y.backward(dy)
        found.append([next(layer.parameters()).grad for layer in trained])
    for fused, plain in zip(*found):
        assert fused is not None
        assert plain is not None
        assert distance(fused, plain) < 0.05


def test_float64_under_autocast() -> None:
    """It is read in autocast's dtype, as by one layer."""
    x, dy = inputs(torch.float64)
    results = []
    for mlp in mlps():
        with torch.autocast("cpu", torch.bfloat16), fp8_autocast(fp8_recipe="tensorwise"):
            given = x.detach().requires_grad_()
            y = mlp(given)
        y.backward(dy)
        assert given.grad is not None
        assert given.grad.dtype is torch.float64
        results.append(given.grad)
    assert distance(*results) < 0.05


def test_what_is_kept_are_the_outputs_of_gate_and_up() -> None:
    mlp, _ = mlps()
    sizes: list[tuple[int, torch.dtype]] = []
    x, _ = inputs()
    for parameter in mlp.parameters():
        parameter.requires_grad_(False)  # no layer keeps its input

    def pack(tensor: Tensor) -> Tensor:
        sizes.append((tensor.numel(), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), fp8_autocast(fp8_recipe="rowwise"):
        mlp(x.requires_grad_())
    weights = [parameter.numel() for parameter in mlp.parameters()]
    assert [size for size in sizes if size[0] not in weights] == [(24 * INNER, torch.bfloat16)] * 2


def test_weights_that_are_fp8() -> None:
    """As FSDP2 gathers them."""
    found = []
    for fuse in (True, False):
        torch.manual_seed(0)
        with fp8_model_init(recipe="tensorwise"):
            layers = {
                name: Linear(*sizes, bias=False, params_dtype=torch.bfloat16)
                for name, sizes in (("gate_proj", (64, 96)), ("up_proj", (64, 96)), ("down_proj", (96, 64)))
            }
        model = llama(1)
        for name, layer in layers.items():
            setattr(model.model.layers[0].mlp, name, layer)
        mlp = converted(fuse, model).model.layers[0].mlp
        x, dy = inputs()
        found.append(of_mlp(mlp, x, dy, "tensorwise"))
        assert getattr(mlp, "why_not", None) == ("" if fuse else None)
    for one, other in zip(*found):
        assert distance(one, other) < 0.05  # type: ignore[arg-type]


# --- Where it is not fused --------------------------------------------------------------------------------------------


def hooked(mlp: Any) -> None:
    mlp.down_proj.register_forward_hook(lambda *args: None)


def hooked_activation(mlp: Any) -> None:
    mlp.act_fn.register_forward_hook(lambda *args: None)


def other_activation(mlp: Any) -> None:
    mlp.act_fn = nn.SiLU(inplace=False)
    mlp.act_fn.forward = F.silu


def forward_replaced(mlp: Any) -> None:
    mlp.gate_proj.forward = MethodType(type(mlp.gate_proj).forward, mlp.gate_proj)


def compiled(mlp: Any) -> None:
    mlp.up_proj.compile(backend="eager")


def parametrized(mlp: Any) -> None:
    parametrize.register_parametrization(mlp.up_proj, "weight", nn.Identity(), unsafe=True)


class Wrapped(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) * 2  # type: ignore[no-any-return]


def wrapped(mlp: Any) -> None:
    mlp.up_proj = Wrapped(mlp.up_proj)


def biased(mlp: Any) -> None:
    torch.manual_seed(2)
    mlp.gate_proj.bias = nn.Parameter(torch.randn(INNER).bfloat16())


def lora(mlp: Any) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["down_proj"], r=4, init_lora_weights=False), mlp)
    mlp.bfloat16()


def sharded_by_tensor_parallelism(mlp: Any, mesh: DeviceMesh) -> None:
    of_columns, of_rows = ColwiseParallel(), RowwiseParallel()
    parallelize_module(mlp, mesh, {"gate_proj": of_columns, "up_proj": of_columns, "down_proj": of_rows})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "down_proj has hooks"),
        (hooked_activation, "its act_fn was replaced or has hooks"),
        (other_activation, "its act_fn was replaced or has hooks"),
        (forward_replaced, "the forward of gate_proj was replaced on the instance"),
        (compiled, "up_proj is compiled by itself"),
        (parametrized, "its up_proj is a ParametrizedLinear"),
        (wrapped, f"its up_proj is a {__name__}.Wrapped"),
        (biased, "gate_proj has a bias, whose gradient needs a tensor that would not be written"),
        (lora, "its down_proj is a peft.tuners.lora.layer.Linear"),
    ],
)
def test_a_change_after_the_conversion(change: Any, reason: str) -> None:
    """The MLP runs layer by layer as without ``fuse``, and the table says why."""
    fused, plain = converted(True), converted(False)
    plan = plan_conversion(llama(), Policy(first_last_layers_bf16=False, fuse=True))
    watch = FirstStep(fused, plan)
    x, dy = inputs()
    found = []
    for model in (fused, plain):
        change(model.model.layers[1].mlp)
        found.append([each for each in of_mlp(model.model.layers[1].mlp, x, dy, "rowwise") if each is not None])
    assert_equal(*found)
    step(fused)
    rows = {mlp.name: mlp for mlp in watch.finish().mlps}
    assert rows["model.layers.0.mlp"].ran is True
    assert (rows["model.layers.1.mlp"].ran, rows["model.layers.1.mlp"].reason) == (False, reason)


def test_tensor_parallelism(one_rank: DeviceMesh) -> None:
    mlp, _ = mlps()
    sharded_by_tensor_parallelism(mlp, one_rank)
    x, dy = inputs()
    of_mlp(mlp, x, dy, "tensorwise")
    assert mlp.why_not == "gate_proj has hooks"


def test_other_settings_of_a_forward() -> None:
    fused, plain = mlps()
    x, dy = inputs()
    recipe = Float8CurrentScaling(backward_override="high_precision")
    assert_equal(of_mlp(fused, x, dy, recipe), of_mlp(plain, x, dy, recipe))
    assert fused.why_not == "its layers compute the gradients of backward_override='high_precision'"
    fused.why_not = None
    calls: list[Any] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *args: calls.append(args))
    try:
        assert_equal(of_mlp(fused, x, dy, "rowwise"), of_mlp(plain, x, dy, "rowwise"))
    finally:
        handle.remove()
    assert len(calls) == 2 * 5
    assert fused.why_not == "hooks of all modules are registered"
    with pytest.raises(RuntimeError, match="Linear does not run in FP8 under torch.func"), fp8_autocast():
        torch.func.vmap(fused)(x)


def test_the_table_says_why_not() -> None:
    model = llama(7)
    layers = [layer.mlp for layer in model.model.layers]
    layers[0].forward = layers[0].forward
    layers[1].act_fn = nn.ReLU()
    layers[2].act_fn = nn.SiLU()
    layers[2].act_fn.register_forward_hook(lambda *args: None)
    layers[3].up_proj = nn.Sequential(layers[3].up_proj, nn.Dropout(0.1))
    biased(layers[4])
    layers[6].act_fn = None
    layers[6].__dict__["act_fn"] = F.gelu
    policy = Policy(first_last_layers_bf16=False, skip=("*.5.mlp.down_proj",), fuse=True)
    assert [mlp.reason for mlp in plan_conversion(model, policy).summary.mlps] == [
        "its forward was replaced on the instance",
        "fuse=True does not support ReLU",
        "its act_fn has hooks",
        "its up_proj is a Sequential",
        "gate_proj has a bias, whose gradient needs a tensor that would not be written",
        "down_proj runs in BF16",
        "fuse=True does not support builtins.builtin_function_or_method",
    ]
    assert not any(mlp.fp8 for mlp in plan_conversion(model, policy).summary.mlps)
    (planned,) = plan_conversion(llama(1), Policy(False, fuse=True)).summary.mlps
    assert (planned.fp8, planned.reason) == (True, "in one autograd function")


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@thorough
def test_a_compiled_mlp_computes_the_same(recipe: str) -> None:
    fused, _ = mlps()
    x, dy = inputs()
    eager = of_mlp(copy.deepcopy(fused), x, dy, recipe)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    for one, other in zip(of_mlp(compiled, x, dy, recipe), eager):
        assert distance(one, other) < 1e-2  # type: ignore[arg-type]


def test_an_empty_input() -> None:
    fused, _ = mlps()
    with fp8_autocast():
        y = fused(torch.zeros(0, HIDDEN, dtype=torch.bfloat16, requires_grad=True))
    y.sum().backward()
    assert y.shape == (0, HIDDEN)


def test_a_down_proj_of_another_dtype_is_refused_as_by_the_layer() -> None:
    for mlp in mlps():
        mlp.down_proj.float()  # type: ignore[operator, union-attr]
        x, _ = inputs()
        with fp8_autocast(), pytest.raises(TypeError, match=r"weight is torch.float32 and the input torch.bfloat16"):
            mlp(x)
        with torch.autocast("cpu", torch.bfloat16), fp8_autocast():
            assert mlp(x).isfinite().all()
    fused, plain = (mlp.requires_grad_(False) for mlp in mlps(dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16), fp8_autocast():
        fused(x), plain(x)
    assert fused.why_not == ""
