"""Weights of an ONNX program as FP8 codes."""

from __future__ import annotations

from typing import Any


def fp8_weights(program: Any) -> None:
    """Store the weights that an ONNX program casts as FP8 codes: a byte per value, and no cast at run time.

    Call it before ``program.save``; it changes ``program`` in place. All nodes that do not depend on an input are
    evaluated, except ``DequantizeLinear``.

    Args:
        program: the ``torch.onnx.ONNXProgram`` returned by ``torch.onnx.export``.

    Raises:
        RuntimeError: If the version of ``onnx``, which computes the codes, is too old.
    """
    from onnxscript import optimizer

    everything = 2**62
    optimizer.fold_constants(
        program.model,
        input_size_limit=everything,
        output_size_limit=everything,
        should_fold=lambda node: node.op_type != "DequantizeLinear",
    )
    optimizer.remove_unused_nodes(program.model)
    casts = [node for node in program.model.graph if node.op_type == "QuantizeLinear"]
    left = [node for node in casts if node.inputs[0].const_value is not None]
    if left:
        raise RuntimeError(f'{len(left)} weights could not be cast: onnx is too old; pip install -U "onnx>=1.19"')
