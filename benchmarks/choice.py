"""The fastest kernel or library for each product of a run, to be shipped for its GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.measuring.files import write
from cuda_kernels.host.gemm_configs import Library
from cuda_kernels.host.gemm_measurements import Measurement, from_json, shipped_file
from cuda_kernels.host.gemm_measurements import document as measurements

_OF_A_LIBRARY = 0.98


def winners(document: dict[str, Any]) -> list[Measurement]:
    """The correct choice with the least median time for each product and size, in the run's order.

    A library is preferred to a kernel of ours that takes more than 0.98 of its time: it needs no proof.
    """
    fastest: dict[tuple[str, tuple[int, int, int]], tuple[float, Measurement]] = {}
    for result in document["suites"].get("products", ()):
        if result.get("choice") and result["correct"] and result["milliseconds"]:
            measured, time = from_json(result["choice"]), result["milliseconds"]["median"]
            if measured is None:
                continue
            time *= _OF_A_LIBRARY if isinstance(measured.choice, Library) else 1.0
            problem = measured.gemm, measured.sizes
            if problem not in fastest or time < fastest[problem][0]:
                fastest[problem] = time, measured
    return [measured for _, measured in fastest.values()]


def ship(document: dict[str, Any], out: Path | None = None) -> Path:
    """Write the winners to the package's file for the GPU, or to ``out``.

    Raises:
        ValueError: the run had no GPU, or timed no product.
    """
    card, found = (document["machine"]["card"] or {}).get("name"), winners(document)
    if not card or not found:
        raise ValueError("the results contain no product that was timed on a GPU; run --only products on one")
    path = out or shipped_file(card)
    write(measurements(card, found), path)
    return path
