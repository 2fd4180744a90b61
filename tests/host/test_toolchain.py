"""Which versions go together: held against the packages' own checks, released and installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cuda_kernels.host.toolchain import conflicts, numbers, versions

NUMPYS = [
    # numba, numpy, whether it is imported: read in numba/__init__.py of each release
    ("0.60.0", "2.0.2", True), ("0.60.0", "2.1.0", False),
    ("0.61.0", "2.1.3", True), ("0.61.0", "2.2.0", False),
    ("0.61.2", "2.2.6", True), ("0.61.2", "2.3.0", False),
    ("0.62.1", "2.3.5", True), ("0.62.1", "2.4.0", False),
    ("0.63.1", "2.3.5", True), ("0.63.1", "2.4.0", False),
    ("0.64.0", "2.4.6", True), ("0.64.0", "2.5.0", False),
    ("0.65.1", "2.4.6", True), ("0.65.1", "2.5.0", False),
    ("0.66.0", "2.4.6", True), ("0.66.0", "2.5.2", False),
    ("0.67.0", "2.5.2", True), ("0.67.0", "2.6.0", False),
]  # fmt: skip


@pytest.mark.parametrize(("numba", "numpy", "imported"), NUMPYS)
def test_numba_and_numpy(numba: str, numpy: str, imported: bool) -> None:
    said = conflicts({"numba": numba, "numpy": numpy})
    assert said == [] if imported else all(each in str(said[0]) for each in (numba, numpy, 'pip install "numpy<'))


@pytest.mark.parametrize("numpy", ["2.5.9", "2.6.0"])
def test_the_installed_numba_agrees(numpy: str) -> None:
    """It compares the version that numpy names."""
    program = f"import numpy; numpy.__version__ = '{numpy}'; import numba"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    refused = "Numba needs NumPy" in done.stderr
    assert refused or done.returncode == 0, done.stderr
    assert bool(conflicts({"numba": versions()["numba"], "numpy": numpy})) == refused


def test_the_way_out_names_the_first_numba_that_serves() -> None:
    (said,) = conflicts({"numba": "0.62.0", "numpy": "2.4.1"})
    assert str(said).endswith('; pip install "numba>=0.64", or pip install "numpy<2.4"')
    (said,) = conflicts({"numba": "0.67.0", "numpy": "2.9"})
    assert str(said).endswith('its newest; pip install "numpy<2.6"')


def test_what_nobody_has_looked_at_is_no_conflict() -> None:
    assert conflicts({"numba": "0.99.0", "numpy": "9.0"}) == []
    assert conflicts({"numba": "0.66.0"}) == conflicts({"numpy": "2.5.2"}) == conflicts({}) == []


@pytest.mark.parametrize(
    ("nvvm", "nvjitlink", "newer"),
    [
        ("13.5.37", "13.0.88", True),
        ("13.0.88", "12.9.86", True),
        ("13.10.1", "13.9.1", True),
        ("13.0.88", "13.0.39", False),
        ("13.0.88", "13.5.37", False),
        ("13.5", "13.5.37", False),
    ],
)
def test_nvvm_may_not_be_newer(nvvm: str, nvjitlink: str, newer: bool) -> None:
    said = conflicts({"nvidia-nvvm": nvvm, "nvidia-nvjitlink": nvjitlink})
    assert len(said) == newer
    assert all("ERROR_OUTDATED_LIBRARY" in each and nvvm in each and nvjitlink in each for each in map(str, said))


def test_nvvm_of_cuda_12_comes_with_nvcc() -> None:
    (said,) = conflicts({"nvidia-cuda-nvcc-cu12": "12.9.86", "nvidia-nvjitlink-cu12": "12.6.85"})
    assert str(said).endswith('; pip install "cuda-toolkit[nvcc]==12.6.*"')
    both = {"nvidia-cuda-nvcc-cu12": "12.9.86", "nvidia-nvjitlink-cu12": "12.6.85", "nvidia-nvvm": "13.0.88"}
    assert conflicts(both | {"nvidia-nvjitlink": "13.0.88"}) == []  # those of CUDA 13 are found first


def test_versions_are_read_as_numbers() -> None:
    assert numbers("2.13.0+cpu") == (2, 13, 0)
    assert numbers("13.5.37") > numbers("13.5") > numbers("13.4.99")
    assert numbers("0.67.0rc1") == (0, 67, 0)
    assert numbers("unknown") == ()


def test_only_what_is_installed_has_a_version() -> None:
    import numpy

    assert versions(["numpy", "no-such-package"]) == {"numpy": numpy.__version__}


def test_the_environment_of_these_tests_has_no_conflict() -> None:
    assert conflicts(versions()) == []


def test_neither_torch_nor_a_compiler_is_imported() -> None:
    program = """
import sys
from cuda_kernels.host.toolchain import conflicts, versions
conflicts(versions())
print(sorted({"torch", "numba", "numpy", "llvmlite", "cuda"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
