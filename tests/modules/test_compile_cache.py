"""FP8 weights in the cache of torch.compile's graphs: they are found again, and never mistaken for others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_fp8 import Linear, fp8_autocast, fp8_model_init
from lightning_fp8.numerics.formats import E4M3, E5M2
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.weights.fp8_tensor import quantized_tensor
from tests.tiers import thorough

CASTS = [
    Cast(float8, layout, power_2_scale=power_2, amax_epsilon=epsilon)
    for float8, layout, power_2, epsilon in product((E4M3, E5M2), Layout, (False, True), (0.0, 1e-6))
    if power_2 or layout is not Layout.MX_1X32
]


def _key(values: Tensor, cast: Cast, *, rowwise: bool = True, columnwise: bool = False) -> str:
    return quantized_tensor(values, cast, rowwise=rowwise, columnwise=columnwise)._stable_hash_for_caching()


def test_two_weights_share_a_key_if_only_their_values_differ() -> None:
    x, cast = torch.randn(128, 256), CASTS[0]
    keys = [_key(x, cast) for cast in CASTS]
    keys += [_key(x, cast, columnwise=True), _key(x, cast, rowwise=False, columnwise=True)]
    keys += [_key(x.bfloat16(), cast), _key(x[:64], cast), _key(x.view(2, 64, 256), cast)]
    requires_grad, observed = quantized_tensor(x, cast), quantized_tensor(x, cast)
    requires_grad.requires_grad_()
    observed.observed = torch.zeros(())
    keys += [each._stable_hash_for_caching() for each in (requires_grad, observed)]
    assert len({*keys}) == len(keys)
    assert keys[: len(CASTS)] == [_key(torch.randn(128, 256), each) for each in CASTS]


SCRIPT = """
import torch
from tests.modules.test_compile_cache import CASTS, _key
print([_key(torch.ones(128, 256), cast) for cast in CASTS])
"""


@thorough
def test_another_process_has_the_same_keys() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    found = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str([_key(torch.ones(128, 256), cast) for cast in CASTS])


@thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.filterwarnings("error:FP8Tensor does not implement")
def test_a_second_compilation_takes_the_graph_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph without gradients: torch does not cache those of autograd functions."""
    from torch._dynamo.utils import counters
    from torch._functorch import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(config, "enable_autograd_cache", True)
    x, found = torch.randn(8, 256), []
    for recipe in ("tensorwise", "tensorwise", "blockwise", "blockwise"):
        torch._dynamo.reset()
        counters.clear()
        with fp8_model_init(recipe=recipe):
            layer = Linear(256, 128)
        with torch.no_grad(), fp8_autocast(fp8_recipe=recipe):
            y = torch.compile(layer, fullgraph=True)(x)
            assert torch.equal(y, layer(x))
        found.append({kind: counters["aot_autograd"][f"autograd_cache_{kind}"] for kind in ("hit", "miss", "bypass")})
    miss, hit = {"hit": 0, "miss": 1, "bypass": 0}, {"hit": 1, "miss": 0, "bypass": 0}
    assert found == [miss, hit, miss, hit]
    assert "cache key" not in caplog.text
