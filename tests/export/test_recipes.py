"""Every recipe in one ONNX model: equal to numpy's casts and to the modules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import DelayedScaling, Linear, fp8_autocast, make_recipe, ops
from lightning_fp8.numerics.scaled import Cast, Role
from tests.export import in_onnx
from tests.export.numpy_fp8 import cast_back, fake_quantized

SELF_SCALED = ("tensorwise", "rowwise", "blockwise", "mxfp8")
FEATURES = 200  # no multiple of a block
NORMS = (True, False)
ACTIVATIONS = {
    "gelu": "tensorwise",
    "swiglu": "rowwise",
    "srelu": "mxfp8",
    "reglu": "blockwise",
    "qgelu": "mxfp8",
    "glu": "rowwise",
}


class Everything(nn.Module):
    """A Linear of each recipe, the casts of x alone, and the casts that follow a norm or an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleDict({recipe: Linear(FEATURES, 136) for recipe in (*SELF_SCALED, "delayed")})
        self.bf16 = Linear(FEATURES, 32, params_dtype=torch.bfloat16)
        self.gamma = nn.Parameter(torch.rand(FEATURES))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outputs = {}
        for recipe, linear in self.linears.items():
            with fp8_autocast(fp8_recipe=recipe):
                outputs[f"linear {recipe}"] = linear(x)
        for recipe in SELF_SCALED:
            outputs[f"cast {recipe}"] = _value(ops.quantize(x, _cast(recipe)), recipe)
        with fp8_autocast(fp8_recipe="blockwise"):
            outputs["linear bf16"] = self.bf16(x.bfloat16()).float()
        gamma = self.gamma.detach()
        for rms in NORMS:
            bias = None if rms else gamma / 2
            normalized = ops.norm_quantize(x, gamma, bias, _cast("mxfp8"), eps=1e-5, rms=rms, zero_centered=rms)
            outputs[f"norm {rms}"] = _value(normalized.operands, "mxfp8")
        for name, recipe in ACTIVATIONS.items():
            outputs[f"activation {name}"] = _value(ops.activation_quantize(x, name, _cast(recipe)), recipe)
        return outputs


def _cast(recipe: str) -> Cast:
    return make_recipe(recipe).cast(Role.INPUT)


def _value(operands: ops.Quantized, recipe: str) -> Tensor:
    """The values of codes: their product with one, which is exact."""
    assert operands.rowwise is not None
    one = ops.quantize(torch.eye(operands.rowwise.data.shape[1]), make_recipe(recipe).cast(Role.WEIGHT))
    assert one.rowwise is not None
    return ops.scaled_mm(operands.rowwise, one.rowwise, out_dtype=torch.float32)


def _inputs() -> Tensor:
    """Rows of all sizes: of 0, of largest values next to the powers of two between which scales change, huge, tiny."""
    x = torch.randn(24, FEATURES) * torch.exp(torch.randn(24, FEATURES))
    x[0] = 0
    for row, power in enumerate((2.0**-20, 2.0**-3, 1.0, 2.0, 2.0**13), start=1):
        edge = torch.tensor(448.0 * power)
        for step, towards in enumerate((edge, torch.tensor(torch.inf), torch.tensor(0.0))):
            x[row + 5 * step] = (torch.rand(FEATURES) - 0.5) * edge
            x[row + 5 * step, ::25] = torch.nextafter(edge, towards)  # in every block
    x[16:20] *= 2.0**-60
    return x


@pytest.fixture(scope="module")
def results() -> tuple[Everything, Tensor, dict[str, np.ndarray], dict[str, Tensor]]:
    """The model, an input of other rows than it was exported with, and what onnxruntime and the modules give."""
    torch.manual_seed(0)
    model = Everything()
    with fp8_autocast(enabled=False, calibrating=True):
        model.linears["delayed"](torch.randn(8, FEATURES) * 4)
    history = model.linears["delayed"].history
    amax = history.amax.clone()
    program = in_onnx.to_onnx(model, torch.randn(5, FEATURES))
    assert torch.equal(history.amax, amax)
    x = _inputs()
    with torch.no_grad():
        expected = model.eval()(x)
    return model, x, dict(zip(expected, in_onnx.run(program, x))), expected


@pytest.mark.parametrize("recipe", SELF_SCALED)
def test_codes_are_those_of_numpy(recipe: str, results: tuple) -> None:
    """Bit by bit, at the edges between two scales too."""
    _, x, found, _ = results
    expected = fake_quantized(x.numpy(), recipe)
    assert np.array_equal(found[f"cast {recipe}"], expected.astype(np.float32))


@pytest.mark.parametrize("recipe", [*SELF_SCALED, "delayed"])
def test_a_linear_is_the_product_of_what_was_cast(recipe: str, results: tuple) -> None:
    model, x, found, eager = results
    linear = model.linears[recipe]
    weight = linear.weight.detach().numpy()
    if recipe == "delayed":
        scales = [1 / float(linear.slots[role].scale) for role in (Role.INPUT, Role.WEIGHT)]
        a, b = (cast_back(values, scale) for values, scale in zip((x.numpy(), weight), scales))
    else:
        a, b = fake_quantized(x.numpy(), recipe), fake_quantized(weight, recipe, is_weight=True)
    expected = a @ b.T + linear.bias.detach().numpy()
    rounding = 1e-5 * (np.abs(a) @ np.abs(b).T + 1)  # of sums of float32
    assert (np.abs(found[f"linear {recipe}"] - expected) < rounding).all()
    of_module = eager[f"linear {recipe}"].numpy()
    if recipe in ("tensorwise", "delayed"):  # it multiplies by the scale: a value between two codes may take the other
        assert np.linalg.norm(of_module - expected) < 1e-3 * np.linalg.norm(expected)
    else:
        assert (np.abs(of_module - expected) < rounding).all()


@pytest.mark.parametrize("output", [f"norm {rms}" for rms in NORMS] + [f"activation {name}" for name in ACTIVATIONS])
def test_fused_casts_are_those_of_the_ops(output: str, results: tuple) -> None:
    """A value that rounds otherwise in float32 may take the next code, an eighth away or the smallest."""
    _, _, found, eager = results
    expected = eager[output].numpy()
    assert np.isclose(found[output], expected, rtol=1e-6).mean() > 0.99
    assert np.allclose(found[output], expected, rtol=0.13, atol=2.0**-17 * np.abs(expected).max())


def test_a_layer_in_bf16_rounds_its_output_once(results: tuple) -> None:
    model, x, found, _ = results
    weight, bias = (parameter.detach().float().numpy() for parameter in (model.bf16.weight, model.bf16.bias))
    a, b = fake_quantized(x.bfloat16().float().numpy(), "blockwise"), fake_quantized(weight, "blockwise", True)
    expected = a @ b.T + bias
    assert (
        np.abs(found["linear bf16"] - expected) <= 2.0**-8 * np.abs(expected) + 1e-5 * np.abs(a).sum(1)[:, None]
    ).all()


def test_delayed_scales_are_constants() -> None:
    """What a runtime with FP8 GEMMs looks for: nodes with constant scales, and nothing beside them."""
    model = Linear(64, 32)
    with fp8_autocast(enabled=False, calibrating=True):
        model(torch.randn(8, 64))
    with fp8_autocast(fp8_recipe=DelayedScaling()):
        program = in_onnx.to_onnx(model, torch.randn(5, 64), opset=20)
    assert in_onnx.count(program) == {"QuantizeLinear": 2, "DequantizeLinear": 2, "Gemm": 1}
