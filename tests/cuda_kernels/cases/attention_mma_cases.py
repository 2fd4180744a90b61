"""What attention's kernels for GPUs without wgmma are tested with: as Hopper's, against the specification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from cuda_kernels.host import launch
from lightning_fp8.attention.ops import Band
from lightning_fp8.proofs.cases import Case
from tests.cuda_kernels.cases.attention_backward_cases import (
    BOTTOM_RIGHT,
    WINDOW,
    Problem,
    check_all,
    check_dkv,
    check_dq,
    check_faint,
    check_nan,
)
from tests.cuda_kernels.cases.attention_kernel_cases import CAUSAL, check_forward
from tests.cuda_kernels.cases.kernel_cases import BF16, FP16

WITHOUT_WGMMA = patch.object(launch, "_emulated_architecture", "120")
"""Launches on the CPU get the kernels of Blackwell for workstations, which are Ada's, too."""


def _forward(name: str, channels: int, **how: Any) -> Case:
    def run(device: str) -> None:
        with WITHOUT_WGMMA:
            check_forward(channels, device, **how)

    return Case(f"mma_attention_forward-{channels}-{name}", run)


def _backward(check: Callable[[Problem, str], None], kernel: str, words: str, problem: Problem) -> Case:
    def run(device: str) -> None:
        with WITHOUT_WGMMA:
            check(problem, device)

    return Case(f"mma_attention_{kernel}-{problem.head_dim}-{words}", run)


FORWARD = [
    _forward("causal", 128, rows=(130, 600), band=BOTTOM_RIGHT),
    _forward("padded", 128, rows=(200, 280), lengths=([200, 70, 0], [0, 280, 130]), band=CAUSAL),
    _forward("window", 128, rows=(300, 300), band=Band(left=100, right=20), special=True, dtype=BF16),
    _forward("ragged", 64, heads=(2, 2), rows=(140, 260), lengths=([1, 140], [260, 3]), ragged=True, dtype=BF16),
    _forward("ragged", 256, rows=(70, 140), lengths=([1, 70], [140, 3]), ragged=True, band=CAUSAL, dtype=BF16),
    _forward(
        "grouped window", 256, heads=(2, 1), rows=(130, 300), band=Band(left=100, right=20), special=True, dtype=BF16
    ),
    _forward("many keys", 256, rows=(16, 300), dtype=BF16),
    _forward("many keys", 64, rows=(128, 780), dtype=BF16),
    _forward("grouped causal", 96, heads=(4, 2), rows=(260, 260), band=CAUSAL, dtype=FP16),
]
BACKWARD = [
    _backward(check_all, "backward", "empty", Problem((0, 70, 50), (60, 0, 130), 1, 1, 128, BOTTOM_RIGHT, "bfloat16")),
    _backward(check_all, "backward", "grouped window", Problem((140,), (150,), 2, 2, 128, WINDOW, "bfloat16")),
    _backward(check_all, "backward", "ragged causal", Problem((1, 140), (260, 3), 2, 1, 96, CAUSAL, ragged=True)),
    _backward(check_nan, "backward", "nan", Problem((130,), (140,), head_dim=96)),
    _backward(check_nan, "backward", "nan", Problem((130,), (140,), head_dim=128, out="bfloat16")),
    _backward(check_all, "backward", "large", Problem((192,), (197,), head_dim=64, band=BOTTOM_RIGHT, magnitude=1e4)),
    _backward(check_all, "backward", "large", Problem((70,), (75,), head_dim=256, band=BOTTOM_RIGHT, magnitude=1e4)),
    _backward(check_faint, "backward", "faint", Problem((128,), (128,), head_dim=96)),
    _backward(check_all, "backward", "window", Problem((140,), (150,), 1, 1, 256, WINDOW, "bfloat16")),
    _backward(check_all, "backward", "ragged", Problem((1, 70), (140, 3), 2, 2, 256, CAUSAL, "bfloat16", ragged=True)),
    _backward(check_nan, "backward", "nan", Problem((130,), (20,), head_dim=256, out="bfloat16")),
    _backward(check_dq, "dq", "many keys", Problem((16,), (300,), head_dim=256, out="bfloat16")),
    _backward(check_dkv, "dkv", "many queries", Problem((140,), (20,), 2, 2, head_dim=256, out="bfloat16")),
    _backward(check_dq, "dq", "many keys", Problem((128,), (520,), head_dim=96)),
    _backward(check_dkv, "dkv", "many queries", Problem((390,), (128,), 2, 2, head_dim=96)),
]
CASES = [*FORWARD, *BACKWARD]
