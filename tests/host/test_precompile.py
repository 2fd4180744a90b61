"""Kernels compiled ahead in processes of their own are in the cache afterwards, and only those that were not."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from cuda_kernels.casts.column_sums import column_sums_kernel
from cuda_kernels.casts.update_scales import update_scales_kernel
from cuda_kernels.gemm import mma, wgmma
from cuda_kernels.gemm.spec import GemmConfig, MmaConfig
from cuda_kernels.host import cache_folder as disk
from cuda_kernels.host import compile_cache
from cuda_kernels.host.gemm_configs import GemmProblem, legal_choices
from cuda_kernels.host.gemm_selection import builds_of
from cuda_kernels.host.precompile import Build, compile_ahead, missing
from cuda_kernels.kernel import Kernel
from tests.cuda_kernels.emulated import needs_compilers
from tests.host.test_gemm_selection import LLAMA
from tests.tiers import thorough


@cache
def broken_kernel() -> Kernel:
    def broken() -> None:
        no_such_name()  # type: ignore[name-defined]  # noqa: F821

    return Kernel("broken", broken, {}, 32)


@thorough
@needs_compilers
def test_what_is_missing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(disk.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(disk, "_memory", {})
    sums, scales = (column_sums_kernel, ("float32",)), (update_scales_kernel, (False,))
    builds: list[Build] = [sums, scales, (broken_kernel, ()), sums]
    assert missing(builds, "90a") == builds[:3]
    assert len(list(compile_ahead(missing(builds, "90a"), "90a"))) == 3
    assert missing(builds, "90a") == [(broken_kernel, ())]
    assert missing(builds, "89") == builds[:3]
    names = {
        (tmp_path / compile_cache.cache_key(function(*arguments), "cubin", "90a"))
        for function, arguments in (sums, scales)
    }
    assert set(tmp_path.iterdir()) == names
    assert list(compile_ahead([], "90a")) == []


@pytest.mark.parametrize("architecture", ["90a", "89", "100"])
def test_builds_of_all_plans(architecture: str) -> None:
    problem = GemmProblem(*(256, 256, 256), LLAMA.spec, architecture, 132, True, True)
    tiles = [plan for plan in legal_choices(problem) if isinstance(plan, (GemmConfig, MmaConfig))]
    builder = wgmma.gemm_kernel if architecture == "90a" else mma.mma_gemm_kernel
    assert builds_of(problem) == [(builder, (problem.spec, tile)) for tile in tiles]
    assert bool(tiles) == (architecture != "100")
