"""What multiplies by default, of every GEMM of every layer: where nothing was measured and no variable is set.

What runs everywhere comes first. ``torch._scaled_mm`` takes one scale or one for each row, on every GPU with FP8, and
blocks of 128 on Hopper from CUDA 12.9 on, and MXFP8 on Blackwell (``tests/ops/scaled_mm_stand_in.py`` has its checks).
A kernel that may never have run on that card serves only what is left; plain torch serves the rest, and says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cuda_kernels.host import gemm_selection, launch
from cuda_kernels.host.gemm_configs import GemmChoice, Library
from lightning_fp8 import LayerNormLinear, LayerNormMLP, Linear, fp8_autocast
from lightning_fp8.numerics.recipes import RECIPES, Float8RowwiseScaling, Format, Recipe, make_recipe
from lightning_fp8.ops import gemm_cuda, plans
from lightning_fp8.ops.gemm import reference_gemm, scaled_mm_accumulate_op, scaled_mm_op
from lightning_fp8.ops.memory import operand_key, tensor_key
from tests.op_sides import note_calls
from tests.ops.scaled_mm_stand_in import stand_in
from tests.tiers import every_pair

LIBRARY, OURS, SAID = "torch._scaled_mm", "a kernel of ours", "plain torch, with a warning"

BACKENDS = {
    # compute capability:     8.9      9.0      10.0     12.0
    ("tensor", "tensor"):    (LIBRARY, LIBRARY, LIBRARY, LIBRARY),
    ("row", "row"):          (LIBRARY, LIBRARY, LIBRARY, LIBRARY),
    ("1x128", "128x128"):    (OURS,    LIBRARY, SAID,    OURS),
    ("1x128", "1x128"):      (OURS,    LIBRARY, SAID,    OURS),
    ("1x32", "1x32"):        (SAID,    SAID,    LIBRARY, LIBRARY),
}  # fmt: skip
ARCHITECTURES = {"89": (8, 9), "90a": (9, 0), "100": (10, 0), "120": (12, 0)}
WITHOUT_BLOCKS = {
    **BACKENDS,
    ("1x128", "128x128"): (OURS, OURS, SAID, OURS),
    ("1x128", "1x128"): (OURS, OURS, SAID, OURS),
}
"""Of torch that is built with an older CUDA than 12.9."""
WITHOUT_MX = {**WITHOUT_BLOCKS, ("1x32", "1x32"): (SAID, SAID, SAID, SAID)}
"""Of torch that is built with an older CUDA than 12.8."""

RECIPES_AND_FORMATS = {name: make_recipe(name) for name in RECIPES} | {
    "rowwise hybrid": Float8RowwiseScaling(fp8_format=Format.HYBRID)
}
LAYERS = {"Linear": 3, "LayerNormLinear": 3, "LayerNormMLP": 6}
"""Layers, and their GEMMs."""


def layer_of(name: str, inputs: int, outputs: int, bias: bool, dtypes: str) -> nn.Module:
    """``dtypes``: of parameters and, where autocast sets another one, of activations."""
    options: dict[str, Any] = {
        "bias": bias,
        "params_dtype": torch.float32 if dtypes.startswith("float32") else torch.bfloat16,
        "fuse_wgrad_accumulation": dtypes.endswith("main_grad"),
    }
    kind: Any = {"Linear": Linear, "LayerNormLinear": LayerNormLinear, "LayerNormMLP": LayerNormMLP}[name]
    layer: nn.Module = kind(inputs, outputs, **options)
    for parameter in layer.parameters():
        if options["fuse_wgrad_accumulation"] and parameter.dim() == 2:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
    return layer


def gemms_of(
    layer: nn.Module, x: Tensor, recipe: Recipe, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Any, ...]]:
    """The arguments of each GEMM of a forward and a backward pass, as :func:`reference_gemm` takes them."""
    found: list[tuple[Any, ...]] = []

    def note(*args: Any) -> None:
        found.append((*args, None, None)[:7])

    def note_accumulation(out: Tensor, *operands: Any) -> None:
        found.append((*operands, None, out.clone()))

    with monkeypatch.context() as patched:
        note_calls(patched, scaled_mm_op, note)
        note_calls(patched, scaled_mm_accumulate_op, note_accumulation)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), fp8_autocast(fp8_recipe=recipe):
            y = layer(x)
        y.backward(torch.randn_like(y))
    return found


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GemmChoice]]:
    """What GEMMs ran on a GPU that is not there."""
    chosen: list[GemmChoice] = []

    def noted(bound: gemm_cuda.BoundGemm, choice: GemmChoice, plan_key: Any) -> Any:
        if choice is Library.CUBLASLT:
            return build(bound, choice, plan_key)
        chosen.append(choice)
        return reference_gemm

    def library(*args: Any, **options: Any) -> Tensor:
        chosen.append(Library.CUBLASLT)
        return stand_in(*args, **options)

    build = gemm_cuda.build_gemm

    monkeypatch.setattr(gemm_cuda, "build_gemm", noted)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "name_of", lambda device: "a GPU that nobody measured")
    monkeypatch.setattr(torch, "_scaled_mm", library)
    monkeypatch.delenv(gemm_selection.CHOICE_VARIABLE, raising=False)
    yield chosen
    plans.clear_plan_cache()


def backend_of(gemm: tuple[Any, ...], chosen: list[GemmChoice]) -> str:
    """What multiplies on the GPU; its result is compared with the specification's."""
    data_a, scale_a, data_b, scale_b, options, bias, out = gemm
    del chosen[:]
    plans.clear_plan_cache()
    a = gemm_cuda.aligned_operand(data_a, scale_a, options.layout_a)
    b = gemm_cuda.aligned_operand(data_b, scale_b, options.layout_b)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = gemm_cuda._plan_gemm(
            torch.device("cuda", 0), operand_key(*a), operand_key(*b), options.flat,
            None if bias is None else tensor_key(bias), None if out is None else tensor_key(out),
        )  # fmt: skip
        copies = [None if out is None else out.clone() for _ in range(2)]
        actual = run(*a, *b, options, bias, copies[0])
        right = reference_gemm(data_a, scale_a, data_b, scale_b, options, bias, copies[1])
        assert actual.stride() == right.stride()
        torch.testing.assert_close(actual, right, rtol=2.0**-7, atol=2.0**-7 * float(right.abs().max()))
    said = [str(each.message) for each in caught]
    if chosen == [Library.CUBLASLT]:
        assert not said
        return LIBRARY
    if chosen and not isinstance(chosen[0], Library):
        assert not said
        return OURS
    (warning,) = said
    assert "plain torch is used instead" in warning
    return SAID


@every_pair
@pytest.mark.parametrize("recipe", RECIPES_AND_FORMATS)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtypes", ["bfloat16", "float32", "float32 and bfloat16", "bfloat16 and main_grad"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(32, 64, 48), (24, 144, 272), (32, 64, 50), (7, 20, 257)], ids=str)
def test_what_runs_everywhere_comes_first(
    recipe: str,
    name: str,
    dtypes: str,
    bias: bool,
    sizes: tuple[int, int, int],
    planned: list[GemmChoice],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``sizes``: tokens, features in and out; 16 does not divide tokens, or features out (as 50,257), or any."""
    tokens, inputs, outputs = sizes
    layer = layer_of(name, inputs, outputs, bias, dtypes)
    x = torch.randn(tokens, inputs, dtype=next(layer.parameters()).dtype, requires_grad=True)
    gemms = gemms_of(layer, x, RECIPES_AND_FORMATS[recipe], dtypes == "float32 and bfloat16", monkeypatch)
    assert len(gemms) == LAYERS[name]
    for table, cuda in ((BACKENDS, "12.9"), (BACKENDS, "13.0"), (WITHOUT_BLOCKS, "12.8"), (WITHOUT_MX, "12.6")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        for column, (architecture, capability) in enumerate(ARCHITECTURES.items()):
            monkeypatch.setattr(launch, "architecture_of", lambda device, found=architecture: found)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
            for gemm in gemms:
                layouts = gemm[4].layout_a.code, gemm[4].layout_b.code
                assert backend_of(gemm, planned) == table[layouts][column], (layouts, architecture, cuda)
