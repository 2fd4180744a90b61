"""The NVIDIA driver's own words, as JSON: run as a program, since a driver may hang.

The questions are cuInit, cuDriverGetVersion and those for devices of the CUDA driver API, and NVML's for the version.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_size_t, create_string_buffer
from typing import Any

COMPUTE_CAPABILITY = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""


def driver_says(load: Callable[[str], Any] = ctypes.CDLL) -> dict[str, Any]:
    """The fields of :class:`lightning_fp8.doctor.machine.Driver`; ``load`` opens a library by name."""
    facts: dict[str, Any] = {"version": _version(load)}
    libcuda = _opened(load, "libcuda.so.1", "nvcuda.dll")
    if libcuda is None:
        return facts | {"problem": "no libcuda.so.1"}
    number = c_int()
    if libcuda.cuDriverGetVersion(byref(number)) == 0:
        facts["cuda"] = [number.value // 1000, number.value % 1000 // 10]
    status = libcuda.cuInit(0)
    if status:
        return facts | {"problem": _name_of(libcuda, status), "status": status}
    count = c_int()
    status = libcuda.cuDeviceGetCount(byref(count))
    if status:
        return facts | {"problem": _name_of(libcuda, status), "status": status}
    return facts | {"cards": [_card(libcuda, index) for index in range(count.value)]}


def _card(libcuda: Any, index: int) -> list[Any]:
    device = c_int()
    name = create_string_buffer(256)
    size = c_size_t()
    libcuda.cuDeviceGet(byref(device), index)
    libcuda.cuDeviceGetName(name, len(name), device)
    libcuda.cuDeviceTotalMem_v2(byref(size), device)
    capability = []
    for attribute in COMPUTE_CAPABILITY:
        number = c_int()
        libcuda.cuDeviceGetAttribute(byref(number), attribute, device)
        capability.append(number.value)
    return [name.value.decode(errors="replace"), capability, size.value]


def _name_of(libcuda: Any, status: int) -> str:
    name = c_char_p()
    libcuda.cuGetErrorName(status, byref(name))
    return name.value.decode() if name.value else f"error {status}"


def _version(load: Callable[[str], Any]) -> str | None:
    nvml = _opened(load, "libnvidia-ml.so.1", "nvml.dll")
    if nvml is None:
        return None
    text = create_string_buffer(80)
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, len(text)):
        return None
    return text.value.decode()


def _opened(load: Callable[[str], Any], *names: str) -> Any:
    for name in names:
        with suppress(OSError):
            return load(name)
    return None


if __name__ == "__main__":
    print(json.dumps(driver_says()))
