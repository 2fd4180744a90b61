"""The tests of this folder need a GPU whose tensor cores support FP8."""

from __future__ import annotations

import os

import pytest
import torch

from cuda_kernels.host.proofs import VARIABLE

os.environ.setdefault(VARIABLE, "0")  # the tests are the proof


def why_not() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    return None if capability >= (8, 9) else f"compute capability {capability} is below 8.9"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := why_not():
        for item in items:
            if "/tests/gpu/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=reason))
