"""ONNX models of FP8 modules, run by onnxruntime on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import torch
from packaging.version import Version
from torch import Tensor, nn

from lightning_fp8 import onnx_export
from lightning_fp8.export import translation_table

OPSET = 21


def to_onnx(model: nn.Module, *inputs: Tensor, opset: int = OPSET, dynamic: bool = True) -> Any:
    """The ONNX program of ``model``; the first dimension of each input may vary."""
    batch = torch.export.Dim("batch")
    with onnx_export(enabled=True):
        return torch.onnx.export(
            model,
            inputs,
            dynamo=True,
            opset_version=opset,
            custom_translation_table=translation_table(),
            dynamic_shapes=tuple({0: batch} for _ in inputs) if dynamic else None,
            verbose=False,
        )


def run(program: Any, *inputs: Tensor) -> list[np.ndarray]:
    """What onnxruntime computes of ``inputs``."""
    options = onnxruntime.SessionOptions()
    if Version(onnxruntime.__version__) < Version("1.29"):  # they make integer products of FP8's
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [each.name for each in session.get_inputs()]
    return session.run(None, {name: x.numpy() for name, x in zip(names, inputs)})


def count(program: Any) -> dict[str, int]:
    """The nodes of each kind."""
    kinds = [node.op_type for node in program.model.graph]
    return {kind: kinds.count(kind) for kind in set(kinds)}
