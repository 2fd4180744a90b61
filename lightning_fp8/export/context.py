"""``onnx_export``: the region in which FP8 modules are traced for inference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from lightning_fp8.arguments import require_bool
from lightning_fp8.delayed.history import all_histories
from lightning_fp8.fp8_region import current_context, fp8_context


def onnx_export(enabled: bool = True) -> AbstractContextManager[None]:
    """Trace FP8 modules for inference inside: no gradients, no amax is written, known scales are constants.

    ``torch.onnx.export`` and ``torch.export.export`` belong inside it, in or around the ``fp8_autocast`` that says the
    recipe. A delayed scale that is 0, of a model that neither trained nor was calibrated, is no constant: the graph
    scales such a tensor from itself, as the module does.

    Args:
        enabled: False changes nothing. Transformer Engine's default is False.

    Raises:
        TypeError: ``enabled`` is not a bool.
        RuntimeError: it is entered inside a calibrating region.
    """
    require_bool("enabled", enabled)  # at the call, not where the region begins
    return _region(enabled)


@contextmanager
def _region(enabled: bool) -> Iterator[None]:
    if not enabled:
        yield
        return
    context = current_context()
    if context.calibrating and not context.enabled:
        raise RuntimeError(
            "onnx_export inside fp8_autocast(enabled=False, calibrating=True), whose scales come when it is left; "
            "leave it, and export inside fp8_autocast()"
        )
    for history in all_histories():
        history.nonzero_scales.read(history.scale)
    with torch.no_grad(), fp8_context(replace(context, observe=False)):
        yield
