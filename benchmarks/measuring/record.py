"""Results of a run, and the JSON document that contains them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from benchmarks.measuring.timing import Contender, Times

OURS = "lightning_fp8"


@dataclass(frozen=True)
class Result:
    """One contender on one shape.

    Attributes:
        name: the work; contenders with the same name and shape do the same work.
        by: the contender.
        shape: of the tensor that is read.
        dtype: of the codes that are written, or of the tensor.
        bytes: minimum memory traffic.
        correct: whether the result equals the reference's; None without a reference.
        errors: relative errors (Frobenius) of the results against float64, by name.
        target: limits by the name of the limited value: upper limits of times, lower limits of all others; ``over
            <contender>`` limits a ratio.
        times: of the device; of the host for host work.
        copy_bandwidth: of a copy of the same shape, in bytes per second.
        host_microseconds: host time of one call.
        parts: parts of ``host_microseconds``.
        note: why there are no numbers, or which of a library's algorithms was used.
        flops: of one call.
        over: speedup over other contenders, by name.
        choice: for ``choose``: problem and plan, in the format of files of measured plans.
        details: what else was measured, by name; in the file only if there is any.
    """

    name: str
    by: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int | None = None
    correct: bool | None = None
    errors: dict[str, float] | None = None
    target: dict[str, float] = field(default_factory=dict)
    times: Times | None = None
    copy_bandwidth: float | None = None
    host_microseconds: float | None = None
    parts: dict[str, float] | None = None
    note: str | None = None
    flops: int | None = None
    over: dict[str, float] = field(default_factory=dict)
    choice: dict[str, Any] | None = None
    details: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        times = self.times / 1e-3 if self.times else None
        bandwidth = self.bytes / self.times.median if self.bytes and self.times else None
        fraction = bandwidth / self.copy_bandwidth if bandwidth and self.copy_bandwidth else None
        teraflops = self.flops / self.times.median / 1e12 if self.flops and self.times else None
        limited = {
            "fraction_of_copy": fraction,
            "teraflops": teraflops,
            **{f"over {by}": ratio for by, ratio in self.over.items()},
            "host_microseconds": self.host_microseconds,
            "milliseconds": times.median if times else None,
        }
        return {
            "name": self.name,
            "by": self.by,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "milliseconds": times and {key: _rounded(value) for key, value in asdict(times).items()},
            "bytes": self.bytes,
            "gigabytes_per_second": _rounded(bandwidth / 1e9) if bandwidth else None,
            "fraction_of_copy": _rounded(fraction),
            "teraflops": _rounded(teraflops),
            "over": {by: _rounded(ratio) for by, ratio in self.over.items()} or None,
            "host_microseconds": _rounded(self.host_microseconds),
            "parts": self.parts and {part: _rounded(value) for part, value in self.parts.items()},
            "correct": self.correct,
            "errors": self.errors and {part: _rounded(error) for part, error in self.errors.items()},
            "target": self.target or None,
            "met": {key: _meets(key, limited.get(key), limit) for key, limit in self.target.items()} or None,
            "note": self.note,
            "choice": self.choice,
            **({"details": self.details} if self.details else {}),
        }


class Candidate(NamedTuple):
    """A result without times, and what to time; None if it cannot run."""

    result: Result
    contender: Contender | None


def said(error: Exception) -> str:
    """``error`` as a one-line note."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _meets(key: str, value: float | None, limit: float) -> bool | None:
    if value is None:
        return None
    return value <= limit if key in ("milliseconds", "host_microseconds") else value >= limit


def _rounded(value: float | None) -> float | None:
    """Round to four digits, which exceeds the accuracy of times; integers are kept."""
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")
