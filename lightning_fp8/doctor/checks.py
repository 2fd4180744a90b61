"""From facts to findings: pure functions. ``wanted``: whether kernels shall be compiled here, or else nothing fails."""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterator, Mapping

from cuda_kernels.host.toolchain import known_conflicts, newer_nvvm, numbers, nvvm_conflict
from lightning_fp8.doctor.findings import Finding, Verdict
from lightning_fp8.doctor.machine import Cache, Driver, Torch
from lightning_fp8.doctor.processes import Answer

OK, WARN, FAIL = Verdict

FP8_CAPABILITY = (8, 9)
"""Ada's; the first with tensor cores for FP8."""

SEES_NONE = "sees no card"
"""What the first probe says where torch has none."""

_LOOK = "look at nvidia-smi and at the system's log (dmesg)"
_DRIVER_ERRORS = {
    100: "compare with nvidia-smi: it should list the card",
    802: "start NVIDIA's fabric manager: systemctl start nvidia-fabricmanager",
    803: "restart the machine: the driver was updated, and its old kernel module still runs",
    804: "remove CUDA's compatibility package (cuda-compat) from the library path",
}
"""What to do, by the ``CUresult`` of cuInit."""


def runs_kernels(driver: Driver) -> bool:
    """Whether a card has tensor cores for FP8."""
    return any(card.capability >= FP8_CAPABILITY for card in driver.cards)


def packages(versions: Mapping[str, str], oldest: Mapping[str, str], torch_build: Torch | None) -> Iterator[Finding]:
    """The installed packages that take part, compared with ``oldest``, the versions that are asked for."""
    if torch_build is None:
        yield Finding("torch", "not installed", FAIL, "pip install torch")
    else:
        built = f"for CUDA {torch_build.cuda_version}" if torch_build.cuda_version else "without CUDA"
        yield _new_enough("torch", torch_build.version, f"{torch_build.version}, built {built}", oldest)
    if "lightning" not in versions:
        instead = versions.get("pytorch-lightning")
        found = f"not installed; a Trainer of pytorch-lightning {instead} refuses our plugins" if instead else ""
        yield Finding("lightning", found or "not installed", FAIL, "pip install lightning")
    for name, version in versions.items():
        if name not in ("torch", "pytorch-lightning"):
            yield _new_enough(name, version, version, oldest)


def _new_enough(name: str, version: str, value: str, oldest: Mapping[str, str]) -> Finding:
    if name in oldest and numbers(version) < numbers(oldest[name]):
        return Finding(name, f"{value}; {oldest[name]} is the oldest that serves", FAIL, f'pip install -U "{name}"')
    return Finding(name, value)


def cards(driver: Driver, torch_build: Torch | None, variables: Mapping[str, str]) -> Iterator[Finding]:
    """The driver, what it drives, and whether torch can use it."""
    known = _dotted(driver.cuda_version) if driver.cuda_version else "an unknown version"
    if driver.version or driver.cuda_version:
        yield Finding("driver", f"{driver.version or 'of unknown version'}, for CUDA up to {known}")
    if not driver.cards:
        yield _no_card(driver, variables.get("CUDA_VISIBLE_DEVICES"))
        return
    for index, card in enumerate(driver.cards):
        value = f"{card.name}, compute capability {_dotted(card.capability)}, {card.bytes / 2**30:.0f} GiB"
        if card.capability >= FP8_CAPABILITY:
            yield Finding(f"card {index}", value)
        else:
            value += f"; FP8's tensor cores begin with {_dotted(FP8_CAPABILITY)}: the numerics run, slower than BF16"
            yield Finding(f"card {index}", value, WARN, "train on it in BF16")
    if torch_build is not None and torch_build.cuda_version is None:
        problem = f"{torch_build.version} is built without CUDA and sees no card"
        yield Finding("torch and driver", problem, FAIL, "install a torch that is built for CUDA")
    elif (
        torch_build is not None
        and torch_build.cuda_version
        and driver.cuda_version
        and numbers(torch_build.cuda_version)[0] > driver.cuda_version[0]
    ):
        problem = f"torch is built for CUDA {torch_build.cuda_version}, and the driver supports CUDA up to {known}"
        way_out = f"update the driver, or install a torch that is built for CUDA {driver.cuda_version[0]}"
        yield Finding("torch and driver", problem, FAIL, way_out)


def _no_card(driver: Driver, visible: str | None) -> Finding:
    if visible is not None and visible.strip() in ("", "-1"):
        return Finding("card", f"hidden by CUDA_VISIBLE_DEVICES={visible!r}", WARN, "unset CUDA_VISIBLE_DEVICES")
    if driver.hangs:
        return Finding("card", f"the driver {driver.problem}", FAIL, f"{_LOOK}; restart the machine")
    if driver.status:
        way_out = _DRIVER_ERRORS.get(driver.status, _LOOK)
        return Finding("card", f"cuInit answers {driver.problem}", FAIL if driver.devices else WARN, way_out)
    if driver.devices:
        way_out = "start the container with its cards: --gpus all, NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return Finding("card", f"/dev has NVIDIA cards, and CUDA none ({driver.problem or 'no error'})", FAIL, way_out)
    return Finding("card", "none: the reference runs here, FP8's numerics in plain torch; kernels can be compiled")


def seen_by_torch(finding: Finding, driver: Driver) -> Finding:
    """The GPUs that torch says it sees, where the driver has some."""
    if finding.value != SEES_NONE or not driver.cards:
        return finding
    way_out = "install a torch that is built for a CUDA that the driver supports"
    return Finding(finding.what, f"{SEES_NONE}, and the driver has {len(driver.cards)}", FAIL, way_out)


def kernel_packages(versions: Mapping[str, str], driver: Driver, wanted: bool) -> Iterator[Finding]:
    """Whether what makes kernels is there, goes together, and with the driver."""
    if "numba-cuda" not in versions:
        missing = "not installed" + ": FP8 casts run as plain torch operations, slower" * wanted
        yield Finding("numba-cuda", missing, *((FAIL, _install(driver)) if wanted else (OK, "")))
    for problem, way_out in known_conflicts(versions):
        yield Finding("versions", problem, _severity(wanted), way_out)
    ours = [numbers(versions[name])[0] for name in ("nvidia-nvjitlink", "cuda-bindings") if name in versions]
    if driver.cuda_version and max(ours, default=0) > driver.cuda_version[0]:
        problem = (
            f"kernels are made by libraries of CUDA {max(ours)}, and the driver supports {_dotted(driver.cuda_version)}"
        )
        yield Finding("versions", problem, _severity(wanted), f"update the driver, or {_install(driver)}")


def compilers(
    compilers: Mapping[str, Mapping[str, str]], versions: Mapping[str, str], driver: Driver, wanted: bool
) -> Iterator[Finding]:
    """The folders of the compilers; ``compilers`` as of :func:`lightning_fp8.doctor.compilers.found_compilers`."""
    if "numba-cuda" not in versions:  # nothing would look for them
        return
    for name, where in compilers.items():
        if "path" in where:
            version = f"{where['version']} " if where.get("version") else ""
            yield Finding(name, f"{version}{where['path']} ({where['via']})")
        else:
            way_out = f"{_install(driver)}, or set CUDA_HOME to the folder of a CUDA toolkit"
            yield Finding(name, f"not found: {where['problem']}", _severity(wanted), way_out)
    nvvm, nvjitlink = (compilers.get(name, {}) for name in ("libnvvm", "libnvJitLink"))
    newer = nvvm.get("version") and nvjitlink.get("version") and newer_nvvm(nvvm["version"], nvjitlink["version"])
    if newer and not any(
        "libnvvm" in conflict.problem for conflict in known_conflicts(versions)
    ):  # else it is said already
        path = f"{nvjitlink['version']} at {nvjitlink['path']}"
        problem, way_out = nvvm_conflict(f"{nvvm['version']} at {nvvm['path']}", nvjitlink["version"], path)
        yield Finding("compilers", problem, _severity(wanted), way_out)


def environment(
    variables: Mapping[str, str], wanted: bool, exists: Callable[[str], bool] = os.path.isdir
) -> Iterator[Finding]:
    """Variables that change what runs."""
    said = {
        name: Finding(name, variables[name])
        for name in ("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LIGHTNING_FP8_GEMM")
        if variables.get(name)
    }
    homes = {os.path.realpath(variables[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in said}
    if len(homes) > 1:
        problem = f"{variables['CUDA_HOME']}, and CUDA_PATH={variables['CUDA_PATH']}: libraries come from either"
        said["CUDA_HOME"] = Finding("CUDA_HOME", problem, WARN, "set CUDA_HOME and CUDA_PATH to one folder")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if name in said and not exists(variables[name]):
            problem = f"{variables[name]} is no folder; compilers are searched there"
            said[name] = Finding(name, problem, WARN, f"unset {name}, or set it to the folder of a CUDA toolkit")
    if said.keys() >= {"LIGHTNING_FP8_GEMM"} and variables["LIGHTNING_FP8_GEMM"] not in ("numba", "cublaslt"):
        problem = f"{variables['LIGHTNING_FP8_GEMM']!r} is neither numba nor cublaslt: products raise an error"
        said["LIGHTNING_FP8_GEMM"] = Finding("LIGHTNING_FP8_GEMM", problem, FAIL, "unset LIGHTNING_FP8_GEMM")
    for name, problem, verdict in (
        ("NUMBA_ENABLE_CUDASIM", "Numba simulates, and compiles no kernel", _severity(wanted)),
        ("CUDA_LAUNCH_BLOCKING", "every launch is waited for, which is slow", WARN),
    ):
        if variables.get(name, "0") not in ("", "0"):
            said[name] = Finding(name, f"{variables[name]}: {problem}", verdict, f"unset {name}")
    yield from said.values()


def kernels(cache: Cache) -> Finding:
    """The kernels that are compiled already."""
    value = f"{cache.kernels} in {cache.folder}, {cache.bytes:,} bytes"
    if cache.problem:
        problem = f"{value}; nothing can be written there ({cache.problem}): each process compiles anew"
        return Finding("compiled kernels", problem, WARN, "set LIGHTNING_FP8_CACHE to a folder that can be written")
    return Finding("compiled kernels", value)


def carried_kernels(folder: Cache) -> Finding:
    """The kernels that were compiled elsewhere, with which no compiler is needed."""
    if folder.kernels:
        return Finding("carried kernels", f"{folder.kernels} in {folder.folder}, {folder.bytes:,} bytes")
    way_out = "unset LIGHTNING_FP8_KERNELS, or set it to what lightning-fp8 kernels build wrote"
    return Finding("carried kernels", f"none in {folder.folder}", WARN, way_out)


def probed(what: str, answer: Answer, seconds: float) -> Finding:
    """The outcome of a process that had ``seconds`` to start something."""
    if answer.status == 0:
        return Finding(what, answer.output.strip())
    if answer.status is None:
        place = f"; it was in {answer.place}" if answer.place else ""
        return Finding(what, f"did not answer within {seconds:g} s{place}", FAIL, _AFTER_A_HANG[what])
    known = (way_out for words, way_out in _KNOWN_ERRORS.items() if words in answer.error)
    way_out = next(known, "mend what fails above; if nothing does, report it with --json's file")
    return Finding(what, answer.last_word, FAIL, way_out)


_KNOWN_ERRORS = {
    "undefined symbol": "unset LD_LIBRARY_PATH, if libraries of another CUDA lie there",
    "ERROR_OUTDATED_LIBRARY": "install libnvvm in the version of the nvJitLink that is loaded, or an older one",
    "No module named 'numba.cuda.": "install numba-cuda with pip: on PYTHONPATH or with --target its .pth is not read",
}
"""What to do, by words of an error."""

_HANG = "a kernel or the driver hangs: look at nvidia-smi, and end the process that still holds the card"
_AFTER_A_HANG = {
    "torch": f"importing torch hangs on a slow disk, or asking for cards in the driver: {_LOOK}",
    "cast": _HANG,
    "product": _HANG,
    "product, cuBLASLt": _HANG,
    "product, kernel": f"{_HANG}; until it is mended, set LIGHTNING_FP8_GEMM=cublaslt",
    "compile": "compiling takes seconds; on a slow disk or a busy machine try --seconds 300",
}


def _install(driver: Driver) -> str:
    extra = "cuda12" if driver.cuda_version and driver.cuda_version[0] == 12 else "cuda"
    return f'pip install "lightning-fp8[{extra}]"'


def _severity(wanted: bool) -> Verdict:
    return FAIL if wanted else WARN


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
