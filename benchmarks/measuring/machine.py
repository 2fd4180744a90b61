"""Where numbers were measured: processor, GPU, driver, versions, commit."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import cuda_kernels
import lightning_fp8

_PACKAGES = ("torch", "triton", "numba", "numba-cuda", "cuda-bindings", "cuda-core", "lightning", "transformers")


def describe() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "card": _card() if torch.cuda.is_available() else None,
        "versions": {
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            **{package: _version(package) for package in _PACKAGES},
            "lightning_fp8": lightning_fp8.__version__,
        },
        "sources": _sources(),
    }


def clocks() -> dict[str, str] | None:
    """The GPU's current state from nvidia-smi: clocks in MHz, power in W, temperature in °C, reasons for throttling."""
    return _nvidia_smi("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active")


def commit() -> str | None:
    """The commit of this source tree, with ``-dirty`` if files differ from it; None outside a repository."""
    return _output(
        "git", "-C", str(Path(__file__).parents[1]), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"
    )


def _card() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        **(_nvidia_smi("driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit") or {}),
    }


def _sources() -> str:
    """A hash of both packages' sources, which identifies results without a commit."""
    hashed = hashlib.sha256()
    for package in (cuda_kernels, lightning_fp8):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    models = [line.split(":", 1)[1].strip() for line in _lines(info) if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _nvidia_smi(*fields: str) -> dict[str, str] | None:
    if not torch.cuda.is_available():
        return None
    card = f"--id=GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    answer = _output("nvidia-smi", card, "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits")
    return dict(zip(fields, (value.strip() for value in answer.split(",")))) if answer else None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
