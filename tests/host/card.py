"""A card that takes launches and notes them, and a kernel for it."""

from __future__ import annotations

import ctypes
import threading
import types as python_types
from typing import Any

import pytest
import torch

from cuda_kernels.casts.amax import amax_kernel
from cuda_kernels.device.tile import tensor_loader
from cuda_kernels.host import launch

KERNEL = amax_kernel(tensor_loader("bfloat16", 4), False)


class Card:
    """A driver that notes launches and reads their parameters."""

    device = torch.device("cuda", 0)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.contexts = threading.local()
        self.values: list[tuple[Any, ...]] = []
        self.kernel = KERNEL
        driver = python_types.SimpleNamespace(
            cuLibraryLoadData=lambda code, *rest: (0, code),
            cuLibraryGetKernel=lambda library, name: (0, 4711),
            cuLaunchKernel=self.launch,
            cuKernelGetFunction=lambda kernel: (0, 4712),
            cuFuncLoad=lambda function: (0,),
            cuDriverGetVersion=lambda: (0, 13010),
            cuDeviceGet=lambda index: (0, index),
            cuDevicePrimaryCtxRetain=lambda device: (0, 0xC0 + device),
            cuCtxGetCurrent=lambda: (0, getattr(self.contexts, "current", 0)),
            cuCtxSetCurrent=lambda context: (setattr(self.contexts, "current", context), (0,))[1],
        )
        monkeypatch.setenv("LIGHTNING_FP8_PROVE", "0")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A Card")
        monkeypatch.setattr(launch, "_driver", lambda: driver)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 99, raising=False)
        launch.architecture.cache_clear()
        launch.card.cache_clear()

    def launch(self, *args: Any) -> tuple[int]:
        assert self.contexts.current
        *rest, parameters, extra = args
        assert not extra
        kinds = {"q": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}
        addresses = (ctypes.c_void_p * len(self.kernel.struct_codes)).from_address(parameters)
        read = (kinds[kind].from_address(address) for kind, address in zip(self.kernel.struct_codes, addresses))
        self.values.append(tuple(value.value for value in read))
        self.launches.append(tuple(rest))
        return (0,)


ADDRESS = 0x7F00_0000_1000
