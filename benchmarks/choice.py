"""The fastest kernel or library of each product that a run timed: what is shipped for its card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.measuring.files import write
from cuda_kernels.host.gemm_measurements import Measurement, from_json, shipped_file
from cuda_kernels.host.gemm_measurements import document as measurements


def winners(document: dict[str, Any]) -> list[Measurement]:
    """Of those that were right, the choice of least median time for each product and size; in the run's order."""
    fastest: dict[tuple[str, tuple[int, int, int]], tuple[float, Measurement]] = {}
    for result in document["suites"].get("products", ()):
        if result.get("choice") and result["correct"] and result["milliseconds"]:
            measured, time = from_json(result["choice"]), result["milliseconds"]["median"]
            problem = measured.gemm, measured.sizes
            if problem not in fastest or time < fastest[problem][0]:
                fastest[problem] = time, measured
    return [measured for _, measured in fastest.values()]


def ship(document: dict[str, Any], out: Path | None = None) -> Path:
    """Write the winners where the package looks for them, or to ``out``.

    Raises:
        ValueError: the run had no card, or timed no product.
    """
    card, found = (document["machine"]["card"] or {}).get("name"), winners(document)
    if not card or not found:
        raise ValueError("the results hold no product that was timed on a card; run --only products on one")
    path = out or shipped_file(card)
    write(measurements(card, found), path)
    return path
