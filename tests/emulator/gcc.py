"""What the emulator needs; imports no compiler."""

from __future__ import annotations

import os

import pytest

from tests.ptx_on_cpu.build import unavailable

needs_gcc = pytest.mark.skipif(bool(unavailable()) and not os.environ.get("CI"), reason=str(unavailable()))
