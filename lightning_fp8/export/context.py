"""``onnx_export``: the context in which FP8 modules are traced for inference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from lightning_fp8.arguments import require_bool
from lightning_fp8.delayed.history import all_histories
from lightning_fp8.fp8_region import current_context, fp8_context


def onnx_export(enabled: bool = True) -> AbstractContextManager[None]:
    """Context manager in which FP8 modules are traced for inference: no gradients, no amaxes, constant scales.

    Call ``torch.onnx.export`` or ``torch.export.export`` inside it, and inside an ``fp8_autocast`` that selects the
    recipe; either may be the outer one. A delayed scale of 0, as in a model that was neither trained nor calibrated, is
    not a constant: the graph computes the scale from the tensor, as the module does.

    Args:
        enabled: if False, nothing changes. Transformer Engine's default is False.

    Raises:
        TypeError: If ``enabled`` is not a bool.
        RuntimeError: If it is entered inside a calibrating region.
    """
    require_bool("enabled", enabled)  # when called, not when entered
    return _region(enabled)


@contextmanager
def _region(enabled: bool) -> Iterator[None]:
    if not enabled:
        yield
        return
    context = current_context()
    if context.calibrating and not context.enabled:
        raise RuntimeError(
            "onnx_export inside fp8_autocast(enabled=False, calibrating=True), which computes scales on exit; leave "
            "it, and export inside fp8_autocast()"
        )
    for history in all_histories():
        history.nonzero_scales.read(history.scale)
    with torch.no_grad(), fp8_context(replace(context, observe=False)):
        yield
