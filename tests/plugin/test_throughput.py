"""Lightning's ThroughputMonitor divides by the peak of the dtype that the plugin computes in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.fabric.utilities.throughput as of_fabric
import lightning.pytorch.callbacks.throughput_monitor as of_trainer
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.loggers import CSVLogger

from lightning_fp8 import FP8FabricPrecision, FP8Precision
from tests.plugin.small_model import Mlp, loader, trainer

DTYPES: list[tuple[dict[str, Any], torch.dtype]] = [
    ({}, torch.bfloat16),
    ({"weights_dtype": "float32", "compute_dtype": "bf16"}, torch.bfloat16),
    ({"weights_dtype": "float32", "compute_dtype": "float32"}, torch.float32),
]


@pytest.fixture(autouse=True)
def an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = of_fabric._CUDA_FLOPS["h100 sxm"]
    for module in (of_fabric, of_trainer):
        monkeypatch.setattr(module, "get_available_flops", lambda device, dtype: peaks[dtype])


@pytest.mark.parametrize(("arguments", "dtype"), DTYPES)
def test_in_the_trainer(arguments: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    monitor = of_trainer.ThroughputMonitor(batch_size_fn=len)
    plugin = FP8Precision("tensorwise", **arguments)
    trainer(plugin, callbacks=(monitor,), logger=CSVLogger(tmp_path), log_every_n_steps=1).fit(Mlp(), loader())
    assert monitor.available_flops == of_fabric._CUDA_FLOPS["h100 sxm"][dtype]


@pytest.mark.parametrize(("arguments", "dtype"), DTYPES)
def test_in_fabric(arguments: Any, dtype: torch.dtype) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[FP8FabricPrecision("tensorwise", **arguments)])
    assert of_fabric.ThroughputMonitor(fabric).available_flops == of_fabric._CUDA_FLOPS["h100 sxm"][dtype]
