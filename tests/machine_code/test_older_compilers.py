"""Attention's kernels for Hopper fit into registers with the compilers that older versions of torch bring, too.

torch requires one version of nvJitLink, and each assigns registers in its own way.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import thorough

COMPILERS = os.environ.get("LIGHTNING_FP8_COMPILERS", "")
"""A folder with a ``pip install --target`` of libnvvm and nvJitLink for each version; .ci/run makes it."""
ROOT = Path(__file__).parents[2]


@thorough
@pytest.mark.skipif(not COMPILERS, reason="LIGHTNING_FP8_COMPILERS names no folder of compilers")
@pytest.mark.parametrize("version", ["12.8.93", "13.0.88"])  # of torch 2.8 and of torch 2.11
def test_no_spills(version: str) -> None:
    folder = Path(COMPILERS, version).resolve()
    command = [sys.executable, "-m", "tests.machine_code.older_compilers", str(folder)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert len(found["libraries"]) == 2
    assert all(library.startswith(str(folder)) for library in found["libraries"])
    assert len(found["reports"]) == 16
    for kernel, report in found["reports"].items():
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, kernel
        assert not re.findall(r"[1-9]\d* bytes stack frame", report), kernel
        assert not re.findall(r"^.*(?:warning|\(C\d+\)).*$", report, re.MULTILINE), kernel
