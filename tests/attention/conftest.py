from __future__ import annotations

import gc

import pytest

from lightning_fp8.attention import attach


@pytest.fixture
def no_other_models() -> None:
    """Those of other tests that still live would be attached by the next ``fp8_autocast`` with ``fp8_dpa``."""
    gc.collect()
    for model in list(attach._prepared):
        attach.detach(model)
        del attach._prepared[model]
