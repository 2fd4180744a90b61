from __future__ import annotations

import gc

import pytest


@pytest.fixture
def no_other_models() -> None:
    """Those of other tests would be attached once more by the next ``fp8_autocast`` with ``fp8_dpa``."""
    gc.collect()
