"""Models of several modules as ONNX models, calibrated, with FP8 weights and in BF16."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_fp8 import (
    DelayedScaling,
    DotProductAttention,
    LayerNorm,
    Linear,
    RMSNorm,
    RotaryPositionEmbedding,
    TransformerLayer,
    convert_module,
    fp8_autocast,
    fp8_state_dict,
)
from lightning_fp8.export import fp8_weights
from tests.export import in_onnx
from tests.small import assert_raises

WIDTH, HEADS = 64, 4


class Model(nn.Module):
    """A fused layer, then attention and an MLP of single modules; the MLP's are foreign ones until converted."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = TransformerLayer(
            WIDTH,
            2 * WIDTH,
            HEADS,
            num_gqa_groups=2,
            activation="swiglu",
            normalization="RMSNorm",
            fuse_qkv_params=True,
            attn_input_format="bshd",
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        self.rotary = RotaryPositionEmbedding(WIDTH // HEADS)
        self.norm1, self.norm2 = LayerNorm(WIDTH, zero_centered_gamma=True), RMSNorm(WIDTH)
        self.qkv = Linear(WIDTH, 3 * WIDTH, parameters_split=("query", "key", "value"))
        self.attention = DotProductAttention(HEADS, WIDTH // HEADS, qkv_format="bshd")
        self.proj = Linear(WIDTH, WIDTH, bias=False)
        self.fc1, self.fc2 = Conv1D(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        nn.init.normal_(self.fc1.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fused(x, rotary_pos_emb=self.rotary(x.shape[1]))
        q, k, v = (each.unflatten(-1, (HEADS, -1)) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(self.attention(q, k, v))
        return x + self.fc2(nn.functional.silu(self.fc1(self.norm2(x))))


def _calibrated(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = convert_module(Model().to(dtype), first_last_layers_bf16=False)
    with fp8_autocast(enabled=False, calibrating=True):
        model(torch.randn(4, 12, WIDTH, dtype=dtype) * 2)
    return model.eval()


@pytest.fixture(scope="module")
def calibrated() -> tuple[nn.Module, Any, dict[str, Any], dict[str, Any]]:
    """A model, its program, and its FP8 state before and after the export."""
    torch.manual_seed(0)
    model = _calibrated()
    before = copy.deepcopy(fp8_state_dict(model))
    with fp8_autocast(fp8_recipe=DelayedScaling()):
        program = in_onnx.to_onnx(model.train(), torch.randn(3, 12, WIDTH))
    return model.eval(), program, before, fp8_state_dict(model)


def test_a_calibrated_model_has_constant_scales(calibrated: tuple) -> None:
    _, program, _, _ = calibrated
    nodes = in_onnx.count(program)
    assert nodes["QuantizeLinear"] == nodes["DequantizeLinear"] == 2 * 8
    assert "ReduceMax" not in nodes
    constants = program.model.graph.initializers
    for node in program.model.graph:
        if node.op_type == "QuantizeLinear":
            assert node.inputs[1].name in constants
            assert node.outputs[0].dtype.name == "FLOAT8E4M3FN"


def test_an_export_observes_nothing(calibrated: tuple) -> None:
    _, _, before, after = calibrated
    tensors = [(value, after[name]) for name, value in before.items() if isinstance(value, Tensor)]
    assert len(tensors) >= 3
    assert all(torch.equal(value, other) for value, other in tensors)


def test_weights_that_stay_as_they_are_are_no_silence(calibrated: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    _, program, _, _ = calibrated
    monkeypatch.setattr("onnxscript.optimizer.fold_constants", lambda model, **options: None)
    assert_raises(lambda: fp8_weights(program), RuntimeError, "onnx is too old")


@pytest.mark.parametrize("weights", ["as they are", "fp8"])
def test_onnxruntime_gives_the_modules_results(weights: str, calibrated: tuple) -> None:
    model, program, _, _ = calibrated
    if weights == "fp8":
        size = len(program.model_proto.SerializeToString())
        fp8_weights(program)
        cast_weights = sum(each.numel() for each in model.parameters() if each.dim() == 2)
        assert len(program.model_proto.SerializeToString()) < size - 3 * cast_weights + 3000
        codes = [each for each in program.model.graph.initializers.values() if each.dtype.name == "FLOAT8E4M3FN"]
        assert sum(np.prod(each.shape.numpy()) for each in codes) == pytest.approx(cast_weights, abs=8)
        assert in_onnx.count(program)["QuantizeLinear"] == 8
    x = torch.randn(5, 12, WIDTH)
    with torch.no_grad(), fp8_autocast(fp8_recipe=DelayedScaling()):
        expected = model(x).numpy()
        high_precision = _high_precision(model, x)
    (found,) = in_onnx.run(program, x)
    rounding = np.abs(high_precision - expected).max()
    assert rounding > 1e-2  # FP8's
    # A float32 sum in another order may move a value to the next code.
    assert np.abs(found - expected).max() < rounding / 3
    assert np.abs(found - expected).mean() < 1e-4


def _high_precision(model: nn.Module, x: Tensor) -> np.ndarray:
    with fp8_autocast(enabled=False):
        return model(x).numpy()


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6()], ids=["Relu", "Clip"])
@pytest.mark.parametrize("shape", [(8, WIDTH), (2, 4, WIDTH)], ids=str)
def test_an_activation_in_front_of_a_cast_is_kept(activation: nn.Module, shape: tuple[int, ...]) -> None:
    """onnxruntime would drop it in front of a cast with a constant scale, as it may for unsigned integers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), activation, nn.Linear(2 * WIDTH, WIDTH)).eval()
    convert_module(model, first_last_layers_bf16=False)
    x = torch.randn(shape)
    with fp8_autocast(enabled=False, calibrating=True), torch.no_grad():
        model(x)
    with fp8_autocast(fp8_recipe="delayed"):
        program = in_onnx.to_onnx(model, x)
        with torch.no_grad():
            right = model(x)
    for weights_in_fp8 in (False, True):
        if weights_in_fp8:
            fp8_weights(program)
        (found,) = in_onnx.run(program, x)
        np.testing.assert_allclose(found, right.numpy(), atol=1e-5)
