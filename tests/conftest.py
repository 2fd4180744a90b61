from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, one core each

import pytest
import torch


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)
