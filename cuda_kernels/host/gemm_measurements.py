"""Measurements of GEMMs: which kernel and tile, or library, was the fastest, and the files that store them.

A file has the measurements on one GPU: each is a GEMM, its sizes, and the fastest choice. The user's file, written by
``lightning-fp8 bench --tune``, is in the folder of compiled kernels. Files shipped with the package, written by
``python -m benchmarks choose``, are in the folder ``measured`` beside this module. So are the rates of FP8 and of BF16,
written by ``python -m benchmarks.rates``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cuda_kernels.gemm.spec import GemmConfig, MmaConfig
from cuda_kernels.host.cache_folder import cache_folder, write_whole
from cuda_kernels.host.gemm_configs import GemmChoice, Library


@dataclass(frozen=True)
class Measurement:
    """A GEMM, and the kernel or library that computed it fastest.

    Attributes:
        gemm: ``str`` of its :class:`GemmSpec`.
        sizes: m, n and k.
        choice: the fastest.
    """

    gemm: str
    sizes: tuple[int, int, int]
    choice: GemmChoice


def user_file(card: str) -> Path:
    """The file of the user's measurements on the GPU named ``card``."""
    return cache_folder() / f"gemm-{_slug(card)}.json"


def shipped_file(card: str) -> Path:
    """The file with measurements on the GPU named ``card`` that ships with the package."""
    return Path(__file__).parent / "measured" / f"{_slug(card)}.json"


def rates_file(card: str) -> Path:
    """The file with the rates of the GPU named ``card``, by which FP8 is compared with BF16."""
    return shipped_file(card).with_suffix(".rates.json")


@cache
def rates_on(card: str) -> dict[str, Any]:
    """The contents of :func:`rates_file`; empty for a GPU that was not measured."""
    path = rates_file(card)
    return json.loads(path.read_text()) if path.exists() else {}  # type: ignore[no-any-return]


def _slug(card: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


@cache
def measured_on(card: str) -> tuple[Measurement, ...]:
    """Measurements on GPUs named ``card``: the user's, then the shipped ones; a damaged file counts as empty."""
    return *_load_measurements(user_file(card)), *_load_measurements(shipped_file(card))


def _load_measurements(path: Path) -> list[Measurement]:
    try:
        return [known for entry in json.loads(path.read_text())["measured"] if (known := from_json(entry))]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def save(card: str, measured: Iterable[Measurement]) -> Path:
    """Add measurements to the user's file, replacing older ones of the same problem.

    Plans made before are still used until the caller clears their cache.
    """
    path = user_file(card)
    merged = {
        (measurement.gemm, measurement.sizes): measurement for measurement in (*_load_measurements(path), *measured)
    }
    write_whole(path, json.dumps(document(card, merged.values()), indent=1).encode())
    measured_on.cache_clear()
    return path


def document(card: str, measured: Iterable[Measurement]) -> dict[str, Any]:
    """The contents of a file of measurements."""
    return {"card": card, "measured": [to_json(measurement) for measurement in measured]}


_CONFIGS = {"GemmConfig": GemmConfig, "MmaConfig": MmaConfig}
_OLDER_FIELDS = {"cluster": 1, "multicast_a": False, "pingpong": False}
"""Fields in files of older versions, with the only values that still have a kernel."""


def to_json(measured: Measurement) -> dict[str, Any]:
    """An entry of a file: a config as its class and fields, a library as its value."""
    choice = measured.choice
    described: Any = choice.value if isinstance(choice, Library) else {"kind": type(choice).__name__} | asdict(choice)
    return {"gemm": measured.gemm, "sizes": list(measured.sizes), "choice": described}


def from_json(entry: dict[str, Any]) -> Measurement | None:
    """Read an entry of a file; None if its kernel was one of an older version.

    Raises:
        KeyError, TypeError, ValueError: If the entry is not valid.
    """
    described = entry["choice"]
    choice: GemmChoice
    if isinstance(described, dict):
        if any(described.get(name, value) != value for name, value in _OLDER_FIELDS.items()):
            return None
        fields = {name: value for name, value in described.items() if name not in ("kind", *_OLDER_FIELDS)}
        choice = _CONFIGS[described["kind"]](**fields)
    else:
        choice = Library(described)
    m, n, k = (int(size) for size in entry["sizes"])
    return Measurement(str(entry["gemm"]), (m, n, k), choice)
