"""The scale update of delayed scaling, for all tensors of a model at once."""

from __future__ import annotations

from torch import Tensor

from lightning_fp8.ops.core.registration import op
from lightning_fp8.ops.scales import cuda as _cuda  # noqa: F401  (registers the kernels)
from lightning_fp8.ops.scales import reference as _reference  # noqa: F401  (registers the implementation)
from lightning_fp8.ops.scales import schema as _schema  # noqa: F401  (defines the op)
from lightning_fp8.scaling import AmaxAlgorithm

_update_scales = op("update_scales")


def update_scales(
    amax: Tensor,
    amax_history: Tensor,
    scale: Tensor,
    fp8_max: Tensor,
    margin: float,
    algorithm: AmaxAlgorithm,
) -> None:
    """The delayed-scaling update of all tensors: push ``amax`` into ``amax_history``, compute ``scale``, zero ``amax``.

    Args:
        amax: float32 ``[n]``.
        amax_history: float32 ``[len, n]``, oldest first; its first step is 0 between updates, as in Transformer
            Engine.
        scale: float32 ``[n]``.
        fp8_max: float32 ``[n]``, the largest value of each tensor's format.
        margin: binary digits of head room.
        algorithm: ``"max"`` of the history or its ``"most_recent"`` step.

    Raises:
        TypeError, ValueError: a tensor of another dtype or shape, or elsewhere; another algorithm, or no such margin.
    """
    if algorithm not in ("max", "most_recent"):
        raise ValueError(f"algorithm={algorithm!r} is unknown; use 'max' or 'most_recent'")
    if not -126 <= margin <= 126:
        raise ValueError(f"margin={margin} must lie from -126 to 126, as float32's exponents do")
    _update_scales(amax, amax_history, scale, fp8_max, margin, algorithm)
