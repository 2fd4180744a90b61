"""Selection of the kernel and tile, or library, for a GEMM: :func:`choose_gemm_on`, in four steps.

1. The user's backend, :data:`CHOICE_VARIABLE`: with ``cublaslt``, cuBLASLt wherever it supports the GEMM; with
   ``numba``, the other steps consider only our kernels, if one supports it.
2. The fastest in a measurement on this GPU (:mod:`cuda_kernels.host.gemm_measurements`) of a GEMM that differs only in
   its sizes, by less than a factor of 2.
3. cuBLASLt, if it supports the GEMM (:func:`~cuda_kernels.host.gemm_configs.cublaslt_takes`).
4. The tile with the least estimated time (:func:`~cuda_kernels.host.gemm_configs.fastest_by_estimate`).

Only legal choices are considered (:func:`~cuda_kernels.host.gemm_configs.legal_choices`). If no kernel is legal, these
are cuBLASLt, or else the reference in plain torch. An op selects once per dtype, shape and memory layout of its
operands. The op has copied operands that are not aligned. Pairs of layouts without a
:class:`~cuda_kernels.gemm.spec.Scaling` are not selected here: the op multiplies them by ``torch._scaled_mm`` (MXFP8 on
Blackwell), unless the backend is ``numba``, or by the reference.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

from cuda_kernels.gemm.mma import mma_gemm_kernel
from cuda_kernels.gemm.spec import GemmConfig
from cuda_kernels.gemm.wgmma import gemm_kernel
from cuda_kernels.host.gemm_configs import (
    GemmChoice,
    GemmProblem,
    Library,
    cublaslt_takes,
    fastest_by_estimate,
    legal_choices,
    legal_configs,
)
from cuda_kernels.host.gemm_measurements import Measurement, measured_on
from cuda_kernels.host.precompile import Build

CHOICE_VARIABLE = "LIGHTNING_FP8_GEMM"
"""Environment variable: a backend, one of :data:`BACKENDS`, to use wherever it supports a GEMM."""
BACKENDS = "numba", "cublaslt"
"""Our kernels, compiled by Numba, and ``torch._scaled_mm``."""

_NEAR = 2.0
"""A measurement applies to a problem whose sizes differ by less than this factor."""


def backend() -> str | None:
    """The user's backend, one of :data:`BACKENDS`, or None.

    Raises:
        ValueError: If the variable has another value.
    """
    given = os.environ.get(CHOICE_VARIABLE) or None
    if given not in (None, *BACKENDS):
        raise ValueError(
            f"{CHOICE_VARIABLE}={given!r} is neither numba nor cublaslt; leave it unset to let sizes decide"
        )
    return given


def choose_gemm_on(card: str, problem: GemmProblem) -> GemmChoice:
    """:func:`choose_gemm` with the measurements on GPUs named ``card`` and the user's environment variable.

    Both are read at each call; an op keeps the choice until its plans are cleared.

    Raises:
        ValueError: If the variable has another value.
    """
    return choose_gemm(problem, measured_on(card), backend())


def choose_gemm(problem: GemmProblem, measured: Iterable[Measurement] = (), backend: str | None = None) -> GemmChoice:
    """Choose the kernel and tile, or library, for ``problem``: one of :func:`legal_choices`.

    Args:
        problem: the GEMM.
        measured: measurements on this GPU.
        backend: one of :data:`BACKENDS`, to use wherever it supports the problem; None selects the fastest.
    """
    legal = legal_choices(problem)
    if backend == "cublaslt" and cublaslt_takes(problem):
        return Library.CUBLASLT
    gemm = str(problem.spec)
    alike = [known for known in measured if known.gemm == gemm and known.choice in legal]
    if backend == "numba":
        alike = [known for known in alike if not isinstance(known.choice, Library)]
    sizes = problem.m, problem.n, problem.k
    near = [(_log_distance(sizes, known.sizes), index) for index, known in enumerate(alike)]
    if near and min(near)[0] < math.log(_NEAR):
        return alike[min(near)[1]].choice
    # Without a measurement, cuBLASLt is preferred to kernels that were never run on this GPU.
    if backend is None and cublaslt_takes(problem):
        return Library.CUBLASLT
    return fastest_by_estimate(problem)


def _log_distance(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    """The distance of two GEMMs: the largest absolute logarithm of the ratios of their sizes."""
    return max(abs(math.log(x / y)) for x, y in zip(a, b))


def builds_of(problem: GemmProblem) -> list[Build]:
    """The functions, with arguments, that build the kernels of all :func:`legal_configs`."""
    return [
        (gemm_kernel if isinstance(config, GemmConfig) else mma_gemm_kernel, (problem.spec, config))
        for config in legal_configs(problem)
    ]
