"""``torch.export`` of FP8 modules, and what cannot be exported."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest
import torch
from onnxscript import evaluator, ir

from lightning_fp8 import DotProductAttention, LayerNorm, Linear, fp8_autocast, onnx_export
from lightning_fp8.export import translation_table
from lightning_fp8.export.translations import VALUES
from lightning_fp8.ops import ACTIVATIONS
from tests.export import in_onnx
from tests.small import assert_raises

NOT_OF_INFERENCE = {
    "activation_backward_quantize",
    "activation_backward_quantize_unobserved",
    "activation_quantize",  # it, norm_quantize and quantize may write to an amax
    "attention_backward",
    "attention_cast",  # it and the next are context parallelism's
    "attention_forward_of_codes",
    "attention_tables",
    "gated_backward_quantize",  # what casts for layers of others is the model's own where it is traced
    "gated_backward_quantize_unobserved",
    "gated_quantize",
    "gated_quantize_unobserved",
    "grouped_mm",  # it and the casts of experts follow a stable sort, which ONNX's exporter does not translate
    "grouped_wgrad",
    "grouped_wgrad_in_high_precision",
    "norm_backward",
    "norm_quantize",
    "rms_norm",  # likewise the model's own where it is traced
    "observe",
    "quantize_columns",  # it and transpose are FSDP2's
    "transpose",
    "quantize",
    "quantize_experts",
    "quantize_experts_unobserved",
    "sample_cast",  # it and the next are the monitor's, of training
    "sample_recipes",
    "scaled_mm_accumulate",
    "update_scales",
}


def _linear(recipe: str) -> torch.nn.Module:
    model = torch.nn.Sequential(LayerNorm(64), Linear(64, 48))
    if recipe == "delayed":
        with fp8_autocast(enabled=False, calibrating=True):
            model(torch.randn(8, 64))
    return model


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_an_exported_program_computes_as_the_module(recipe: str) -> None:
    """Of a model that trains, with another batch, after a round trip through a file."""
    model = _linear(recipe).train()
    with onnx_export(), fp8_autocast(fp8_recipe=recipe):
        program = torch.export.export(model, (torch.randn(4, 64),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    targets = [str(node.target) for node in program.graph.nodes if "lightning_fp8" in str(node.target)]
    assert targets == ["lightning_fp8.quantize_unobserved.default"] * 2 + ["lightning_fp8.scaled_mm.default"]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    x = torch.randn(7, 64)
    with torch.no_grad(), fp8_autocast(fp8_recipe=recipe):
        expected = model.eval()(x)
    assert torch.equal(torch.export.load(file).module()(x), expected)


def test_every_op_of_an_inference_has_a_translation() -> None:
    names = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if "lightning_fp8::" in name}
    translated = {op.name().partition("::")[2].partition(".")[0] for op in translation_table()}
    assert names == translated | NOT_OF_INFERENCE
    assert set(VALUES) == set(ACTIVATIONS)


def test_fp8_attention_is_refused() -> None:
    attention = DotProductAttention(2, 16, qkv_format="bshd")
    x = torch.randn(1, 8, 2, 16)
    with fp8_autocast(fp8_recipe={"name": "tensorwise", "fp8_dpa": True}), pytest.raises(Exception) as error:
        in_onnx.to_onnx(attention, x, x.clone(), x.clone(), dynamic=False)
    assert "fp8_dpa=False" in str(error.value)


def test_blocks_need_a_newer_opset() -> None:
    translation = translation_table()[torch.ops.lightning_fp8.quantize_unobserved.default]
    asked = SimpleNamespace(opset=SimpleNamespace(version=20))
    x = SimpleNamespace(shape=(4, 64), dtype=ir.DataType.FLOAT)
    with evaluator.default_as(asked):  # as torch's exporter does
        assert_raises(
            lambda: translation(x, ir.DataType.FLOAT8E4M3FN, "row", True, 0.0, True, False, False),
            ValueError,
            "opset_version=21",
        )


def test_no_export_while_calibrating() -> None:
    with fp8_autocast(enabled=False, calibrating=True):
        assert_raises(onnx_export().__enter__, RuntimeError, "leave it")
    assert_raises(lambda: onnx_export("yes"), TypeError, "enabled='yes'")  # type: ignore[arg-type]


def test_disabled_changes_nothing() -> None:
    with onnx_export(enabled=False):
        assert torch.is_grad_enabled()


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("lightning_fp8.export.")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(f"lightning_fp8.export.{name.rpartition('.')[2]}")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert_raises(translation_table, ImportError, r'needs onnxscript: pip install -e "\.\[onnx\]" in the checkout')
