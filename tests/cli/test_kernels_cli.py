"""``lightning-fp8 kernels build``: what a card would start is compiled into a folder, and taken from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_kernels.casts.column_sums import column_sums_kernel
from cuda_kernels.casts.update_scales import update_scales_kernel
from cuda_kernels.host import cache_folder, compile_cache, gemm_selection
from cuda_kernels.kernel import Kernel
from cuda_kernels.lowering import compiler
from lightning_fp8 import Linear, fp8_autocast
from lightning_fp8.cli import kernels
from lightning_fp8.doctor import probes
from lightning_fp8.numerics.recipes import RECIPES, make_recipe
from lightning_fp8.numerics.scaled import Layout
from lightning_fp8.ops.gemm import scaled_mm_accumulate_op, scaled_mm_op
from lightning_fp8.ops.gemm_cuda import SCALINGS
from tests.cuda_kernels.emulated import needs_compilers
from tests.tiers import thorough


def two() -> list[Kernel]:
    return [column_sums_kernel("float32"), update_scales_kernel(False)]


def one_is_broken() -> list[Kernel]:
    def broken() -> None:
        no_such_name()  # type: ignore[name-defined]  # noqa: F821

    return [column_sums_kernel("float32"), Kernel("broken", broken, {}, 32)]


@thorough
@needs_compilers
def test_what_was_built_is_taken_whatever_compilers_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.build(two, (), "90a", tmp_path) == {}
    (name,) = kernels.build(one_is_broken, (), "89", tmp_path)
    assert name == "broken"
    manifest = json.loads((tmp_path / kernels.MANIFEST).read_text())
    assert all("numba-cuda " in each.pop("compilers") for each in manifest.values())
    sums, scales = two()
    assert manifest == {
        compile_cache.source_key(sums, "cubin", "90a"): {"name": sums.name, "arch": "90a"},
        compile_cache.source_key(scales, "cubin", "90a"): {"name": scales.name, "arch": "90a"},
        compile_cache.source_key(sums, "cubin", "89"): {"name": sums.name, "arch": "89"},
    }
    assert {path.name for path in tmp_path.iterdir()} == {kernels.MANIFEST, *manifest}

    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, str(tmp_path / "empty"))
    monkeypatch.setattr(cache_folder, "_memory", {})
    monkeypatch.setattr(compile_cache, "compilers", lambda: "others")
    monkeypatch.setattr(compiler, "ltoir", lambda *args: pytest.fail("it was compiled again"))
    monkeypatch.setenv(cache_folder.CARRIED_VARIABLE, str(tmp_path))
    assert compile_cache.cubin(sums, "90a").startswith(b"\x7fELF")
    path = tmp_path / compile_cache.source_key(scales, "cubin", "90a")
    path.write_bytes(path.read_bytes()[:-1])  # damaged: as if it were not there
    with pytest.raises(BaseException, match="it was compiled again"):
        compile_cache.cubin(scales, "90a")


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_layer_starts(recipe: str) -> None:
    """Casts of all that is multiplied, both operands of a product in the order that a card reads, and all plans."""
    found = kernels.kernels_of_layer(256, 512, 8192, make_recipe(recipe), "90a")
    names = [kernel.name for kernel in found]
    casts = [name for name in names if name.startswith("quantize")]
    assert casts
    assert {name[name.index("(") + 1 :].split(",")[0] for name in casts} == {"bfloat16", "float32"}
    assert not any("vector=1" in name for name in casts)
    assert any("columnwise=True" in name for name in casts), "dgrad and wgrad read transposed copies"
    assert any(name.startswith("transpose") for name in names) == (recipe != "mxfp8")
    assert any(name.startswith("quantize_columns") for name in names) == (recipe == "rowwise")
    assert ("update_scales" in " ".join(names)) == (recipe == "delayed")
    assert any(name.startswith("amax") for name in names) == (recipe in ("delayed", "tensorwise"))
    products = {name.split(",")[0] for name in names if "gemm" in name}
    assert bool(products) == (recipe != "mxfp8")
    gradient = "e5m2 e4m3" if recipe in ("delayed", "tensorwise") else "e4m3 e4m3"
    assert not products or any(gradient in name and "promote" in name for name in products)
    # The forward product's; sums of blocks are always promoted.
    assert any("promote" not in name for name in products) == (recipe not in ("blockwise", "mxfp8"))


def test_a_product_without_kernels_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the weight's gradient."""
    monkeypatch.delitem(SCALINGS, (Layout.BLOCK_1X128, Layout.BLOCK_1X128))
    found = kernels.kernels_of_layer(256, 512, 8192, make_recipe("blockwise"), "90a")
    products = {kernel.name.split(",")[0] for kernel in found if "gemm" in kernel.name}
    assert products
    assert all("1x128*128x128" in name for name in products), products


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "blockwise"])
def test_what_training_starts_is_built(recipe: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products too: whichever tile is chosen, it is among those of the layer."""
    monkeypatch.setenv(gemm_selection.CHOICE_VARIABLE, "numba")
    monkeypatch.setattr(kernels, "_OPS", (*kernels._OPS, scaled_mm_op, scaled_mm_accumulate_op))
    layer = Linear(512, 256, bias=bias)  # float32 weights
    with kernels.noted() as found:
        for _ in range(3):
            with fp8_autocast(fp8_recipe=recipe), torch.autocast("cpu", torch.bfloat16):
                layer(torch.randn(384, 512).bfloat16()).float().sum().backward()
    names = {name for name in found if "gemm" in name}
    assert len({name.split(",")[0] for name in names}) >= 2
    built = {kernel.name for kernel in kernels.kernels_of_layer(512, 256, 384, make_recipe(recipe), "90a")}
    assert set(found) <= built, set(found) - built


def test_what_the_doctor_casts_with_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would ask for compilers on a machine that needs none."""
    monkeypatch.setattr(probes, "device", lambda: torch.device("cpu"))
    with kernels.noted() as found:
        probes.cast()
        probes.PROBES["product"]()
    assert found
    assert set(found) <= {kernel.name for kernel in kernels.layers_kernels([], 128, [], "90a")}


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    def build(*args: Any) -> dict[str, str]:
        asked.append(args)
        (tmp_path / kernels.MANIFEST).write_text('{"key": {"name": "a kernel"}}')
        return {}

    monkeypatch.setattr(kernels, "build", build)
    command = f"build --linear 64x128 --linear 128x64 --tokens 512 --recipe rowwise --out {tmp_path}"
    kernels.main(command.split())
    wanted = [(64, 128), (128, 64)], 512, ["rowwise"], "90a"
    assert asked == [(kernels.layers_kernels, wanted, "90a", tmp_path)]
    assert f"holds 1 kernels; LIGHTNING_FP8_KERNELS={tmp_path}" in capsys.readouterr().out
    for wrong in (["build", "--out", "x"], ["build", "--linear", "4096", "--out", "x"], []):
        with pytest.raises(SystemExit):
            kernels.main(wrong)
    monkeypatch.setattr(kernels, "build", lambda *args: {"a kernel": "no registers"})
    with pytest.raises(SystemExit):
        kernels.main(command.split())
    assert "not built: a kernel: no registers" in capsys.readouterr().out
