"""What computes a GEMM: the choice, and the measurements that it rests on.

A file holds the measurements of one GPU: a GEMM, its sizes, and what computed it fastest. The user's file is in the
folder of compiled kernels; files that ship with the package are in ``measured`` here, which has none yet.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuda_kernels.gemm.spec import GemmConfig, MmaConfig
from cuda_kernels.host.cache import cache_folder, write_whole
from cuda_kernels.host.gemm_configs import (
    GemmChoice,
    GemmProblem,
    Library,
    choose_by_estimate,
    cublaslt_takes,
    legal_choices,
    legal_configs,
)

if TYPE_CHECKING:
    from cuda_kernels.host.precompile import Build

CHOICE_VARIABLE = "LIGHTNING_FP8_GEMM"
"""Environment variable: ``numba`` or ``cublaslt`` takes that wherever it can; else what was measured decides."""

_NEAR = 2.0
"""A measurement counts for a problem whose sizes differ by less than this factor."""


@dataclass(frozen=True)
class Measurement:
    """What computed a GEMM fastest.

    Attributes:
        gemm: ``str`` of its :class:`GemmSpec`.
        sizes: m, n and k.
    """

    gemm: str
    sizes: tuple[int, int, int]
    choice: GemmChoice


def choose_gemm(problem: GemmProblem, measured: Iterable[Measurement] = (), wish: str | None = None) -> GemmChoice:
    """What computes ``problem``: one of :func:`legal_choices`.

    Args:
        measured: measurements on this GPU.
        wish: ``numba``, ``cublaslt`` or None.

    Raises:
        ValueError: another wish.
    """
    if wish not in (None, "numba", "cublaslt"):
        raise ValueError(
            f"{CHOICE_VARIABLE}={wish!r} is neither numba nor cublaslt; leave it unset to let sizes decide"
        )
    legal = legal_choices(problem)
    if wish == "cublaslt" and cublaslt_takes(problem):
        return Library.CUBLASLT
    gemm = str(replace(problem.spec, amax=False))  # which makes no tile faster than another
    alike = [each for each in measured if each.gemm == gemm and each.choice in legal]
    if wish == "numba":
        alike = [each for each in alike if not isinstance(each.choice, Library)]
    sizes = problem.m, problem.n, problem.k
    near = [(_log_distance(sizes, each.sizes), index) for index, each in enumerate(alike)]
    if near and min(near)[0] < math.log(_NEAR):
        return alike[min(near)[1]].choice
    # Without a measurement, what runs everywhere comes before what never ran on this GPU.
    if wish is None and cublaslt_takes(problem):
        return Library.CUBLASLT
    return choose_by_estimate(problem)


def _log_distance(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    """The distance of two GEMMs: the largest absolute logarithm of the ratios of their sizes."""
    return max(abs(math.log(x / y)) for x, y in zip(a, b))


def builds_of(problem: GemmProblem) -> list[Build]:
    """How to build the kernels of all its :func:`legal_configs`."""
    from cuda_kernels.gemm import mma, wgmma

    return [
        (wgmma.gemm_kernel if isinstance(config, GemmConfig) else mma.mma_gemm_kernel, (problem.spec, config))
        for config in legal_configs(problem)
    ]


# --- Files ------------------------------------------------------------------------------------------------------------


def user_file(card: str) -> Path:
    """The file of the user's measurements on the GPU named ``card``."""
    return cache_folder() / f"gemm-{_slug(card)}.json"


def shipped_file(card: str) -> Path:
    """The file of measurements on the GPU named ``card`` that ships with the package."""
    return Path(__file__).parent / "measured" / f"{_slug(card)}.json"


def _slug(card: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


@cache
def measured_on(card: str) -> tuple[Measurement, ...]:
    """The measurements on GPUs named ``card``: the user's, then the shipped ones; a damaged file counts as empty."""
    return *_kept_in(user_file(card)), *_kept_in(shipped_file(card))


def _kept_in(path: Path) -> list[Measurement]:
    try:
        return [from_json(entry) for entry in json.loads(path.read_text())["measured"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def keep(card: str, measured: Iterable[Measurement]) -> Path:
    """Add measurements to the user's file, in place of older ones of the same problem."""
    path = user_file(card)
    kept = {(each.gemm, each.sizes): each for each in (*_kept_in(path), *measured)}
    write_whole(path, json.dumps(document(card, kept.values()), indent=1).encode())
    measured_on.cache_clear()
    return path


def document(card: str, measured: Iterable[Measurement]) -> dict[str, Any]:
    """The contents of a file of measurements."""
    return {"card": card, "measured": [to_json(each) for each in measured]}


_JSON_KINDS: dict[str, type[GemmConfig | MmaConfig]] = {"Tile": GemmConfig, "MmaTile": MmaConfig}
_JSON_FIELDS: dict[type, dict[str, str]] = {
    GemmConfig: {
        "mma_warpgroups": "groups",
        "tile_n": "columns",
        "multicast_a": "shares_a",
        "epi_stages": "buffers",
        "smem_epilogue": "staged",
        "pingpong": "alternate",
    },
    MmaConfig: {"tile_m": "rows", "tile_n": "columns"},
}
"""How files of measurements name configs, and their fields where that differs."""


def to_json(measured: Measurement) -> dict[str, Any]:
    """One entry of a file."""
    choice = measured.choice
    if isinstance(choice, Library):
        described: Any = choice.value
    else:
        kind = next(name for name, cls in _JSON_KINDS.items() if isinstance(choice, cls))
        names = _JSON_FIELDS[type(choice)]
        described = {"kind": kind} | {names.get(field, field): value for field, value in asdict(choice).items()}
    return {"product": measured.gemm, "sizes": list(measured.sizes), "plan": described}


def from_json(entry: dict[str, Any]) -> Measurement:
    """Read an entry of a file.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    described = entry["plan"]
    if isinstance(described, dict):
        values = dict(described)
        cls = _JSON_KINDS[values.pop("kind")]
        values |= {field: values.pop(name) for field, name in _JSON_FIELDS[cls].items() if name in values}
        choice: GemmChoice = cls(**values)
    else:
        choice = Library(described)
    m, n, k = (int(size) for size in entry["sizes"])
    return Measurement(str(entry["product"]), (m, n, k), choice)
