"""What computes a GEMM: every config is legal, every problem has a choice, and what was measured is taken."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuda_kernels.gemm import spec
from cuda_kernels.gemm.spec import SCALE_N, GemmConfig, GemmSpec, MmaConfig, Scaling
from cuda_kernels.host import cache_folder, gemm_configs, gemm_measurements, gemm_selection
from cuda_kernels.host.gemm_configs import GemmChoice, GemmProblem, Library, fastest_by_estimate, legal_choices
from cuda_kernels.host.gemm_measurements import Measurement, from_json, measured_on, save
from cuda_kernels.host.gemm_selection import choose_gemm, choose_gemm_on
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops import plans
from lightning_fp8.ops.cast import quantize_op
from lightning_fp8.ops.gemm import Gemm, scaled_mm_op
from lightning_fp8.ops.gemm_cuda import SCALINGS
from lightning_fp8.proofs.comparing import kernels_of, reference_of

SIZES = st.integers(1, 200_000)
PRODUCTS = st.builds(
    lambda formats, scaling, out_dtype, bias_dtype, accumulate, promote: GemmSpec(
        *formats,
        scaling,
        out_dtype="float32" if accumulate else out_dtype,
        bias_dtype=None if accumulate else bias_dtype,
        accumulate=accumulate,
        promote=promote,
    ),
    st.sampled_from([("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")]),
    st.sampled_from(Scaling),
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.sampled_from([None, "bfloat16", "float32"]),
    st.booleans(),
    st.booleans(),
)
PROBLEMS = st.builds(
    GemmProblem, SIZES, SIZES, SIZES, PRODUCTS, st.sampled_from(["89", "90a", "100", "120"]), st.integers(1, 200),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip


def shared_bytes(tile: GemmConfig, product: GemmSpec) -> int:
    """By the sizes of what lies there: operands, results on their way, scales, and barriers."""
    operands = tile.stages * 128 * (tile.tile_m + tile.tile_n)
    leaving = tile.epi_stages * 64 * 128 * tile.mma_warpgroups if tile.smem_epilogue else 0
    scales = 4 * tile.stages * (
        (tile.tile_m if product.scaling in (Scaling.BLOCK_1X128_128X128, Scaling.BLOCK_1X128_1X128) else 0)
        + (tile.tile_n if product.scaling is Scaling.BLOCK_1X128_1X128 else 0)
    )  # fmt: skip
    return operands + leaving + scales + 16 * tile.stages


def test_scales_of_kernels_are_those_of_layouts() -> None:
    assert {scaling for scaling in SCALINGS.values() if scaling.along_k}
    for (a, b), scaling in SCALINGS.items():
        assert scaling.along_k == a.scales_along_k == b.scales_along_k
        assert scaling.b_along_k_by_row == (b.scales_along_k and b.block[0] == 1)
        assert scaling.b_along_k_by_block == (b.block[0] == SCALE_N)
        if scaling.along_k:
            assert a.block[1] == b.block[1] == 128
            assert a.block[0] == 1  # stages hold scales of each row of A


@given(problem=PROBLEMS)
def test_every_config_is_legal(problem: GemmProblem) -> None:
    """Within the limits of NVIDIA's manuals: shared memory, registers, shapes of instructions and of copies."""
    found, product = legal_choices(problem), problem.spec
    assert found[-1] is Library.REFERENCE
    assert len(set(found)) == len(found)
    for choice in found:
        if isinstance(choice, GemmConfig):
            assert problem.architecture == "90a"
            assert shared_bytes(choice, product) <= 227 * 1024
            # 65,536 registers: 224 for each thread that multiplies, 56 for the producers'. A thread has the sums of its
            # warpgroup's rows, in float32, and where partial sums are scaled or added, those of 64 rows.
            assert 128 * (224 * choice.mma_warpgroups + 56) <= 65536
            assert choice.tile_m // choice.mma_warpgroups * choice.tile_n // 128 <= 224
            assert not product.promote or (choice.waves + 1) * 64 * choice.tile_n // 128 <= 224
            assert choice.tile_n % 8 == 0 and choice.tile_n <= 256  # noqa: PT018  (wgmma's n)
            assert max(choice.tile_m, choice.tile_n) <= 256  # rows of a tensor copy's box
            # Swizzled places begin at multiples of 1024 bytes, scales that are copied at multiples of 128.
            assert (
                choice.tile_m * 128 % 1024
                == choice.tile_n * 128 % 1024
                == 4 * choice.tile_m % 128
                == 4 * choice.tile_n % 128
                == 0
            )
            assert problem.out_aligned or not choice.smem_epilogue
            assert problem.even or not choice.even
            if product.scaling is Scaling.BLOCK_1X128_128X128:  # no tile has columns of more than two blocks
                assert all(-(-(j + 1) * choice.tile_n // 128) - j * choice.tile_n // 128 <= 2 for j in range(128))
        elif isinstance(choice, MmaConfig):
            assert problem.architecture in ("89", "120")
            scales = choice.tile_m * product.scaling.along_k + choice.tile_n * (
                product.scaling is Scaling.BLOCK_1X128_1X128
            )
            assert choice.stages * (128 * (choice.tile_m + choice.tile_n) + 4 * scales) <= 99 * 1024
            assert problem.even or not choice.even
        elif choice is Library.CUBLASLT:
            assert product.a_dtype == "e4m3" or product.b_dtype == "e4m3"
            assert not product.scaling.along_k or (problem.library_blocks and product.a_dtype == product.b_dtype)


def test_kernels_and_operands_name_the_same_blocks() -> None:
    assert {(a.value, b.value): scaling for (a, b), scaling in SCALINGS.items()} == {
        ("tensor", "tensor"): Scaling.TENSOR,
        ("row", "row"): Scaling.ROW,
        ("1x128", "128x128"): Scaling.BLOCK_1X128_128X128,
        ("1x128", "1x128"): Scaling.BLOCK_1X128_1X128,
    }
    for (a, b), scaling in SCALINGS.items():
        assert scaling.along_k == a.scales_along_k == b.scales_along_k
        assert not scaling.along_k or a.block == (1, 128)
        assert not scaling.b_along_k_by_row or b.block == (1, 128)
        assert not scaling.b_along_k_by_block or b.block == (128, 128)


@given(problem=PROBLEMS, backend=st.sampled_from([None, "numba", "cublaslt"]))
def test_every_problem_has_a_choice(problem: GemmProblem, backend: str | None) -> None:
    choice = choose_gemm(problem, backend=backend)
    assert choice in legal_choices(problem)
    if problem.architecture in ("89", "90a", "120") and backend == "numba":
        assert not isinstance(choice, Library)
    if backend == "cublaslt" and gemm_configs.cublaslt_takes(problem):
        assert choice is Library.CUBLASLT


LLAMA = GemmProblem(
    8192, 4096, 4096, GemmSpec("e4m3", "e4m3", Scaling.TENSOR, "bfloat16", promote=False), "90a", 132, True, True
)
SPECS_TIMED = [
    replace(LLAMA.spec, scaling=scaling, promote=promote, out_dtype=dtype, accumulate=accumulate)
    for scaling in Scaling
    for promote in (False, True)
    for dtype, accumulate in (("bfloat16", False), ("float32", False), ("float32", True))
]


def test_estimates() -> None:
    """Large products take the largest tiles; few rows take few."""
    large = fastest_by_estimate(LLAMA)
    assert isinstance(large, GemmConfig)
    assert large.tile_m * large.tile_n == 128 * 256
    promoted = fastest_by_estimate(replace(LLAMA, spec=replace(LLAMA.spec, promote=True)))
    assert isinstance(promoted, GemmConfig)
    assert promoted.tile_m * promoted.tile_n == 256 * 128
    few = fastest_by_estimate(replace(LLAMA, m=8))
    assert isinstance(few, GemmConfig)
    assert few.tile_m == 64


def test_the_estimate_agrees_with_the_times_on_a_gpu() -> None:
    """Of each product that was timed on an H200, the chosen tile takes at most 2 % longer than the fastest of today's,
    and at most 6 % longer than the fastest of all that were timed."""
    path = Path(__file__).parents[2] / "benchmarks/results/2026-11-26-h200-products.json"
    every: dict[tuple[str, tuple[int, ...]], list[float]] = {}
    todays: dict[tuple[str, tuple[int, ...]], dict[GemmChoice, float]] = {}
    for result in json.loads(path.read_text())["suites"]["products"]:
        choice = result["choice"]
        if choice and choice["choice"] != "cublaslt":
            product, time = (choice["gemm"], tuple(choice["sizes"])), result["milliseconds"]["median"]
            every.setdefault(product, []).append(time)
            if measured := from_json(choice):
                todays.setdefault(product, {})[measured.choice] = time
    assert len(every) == len(todays) == 20
    for (gemm, (m, n, k)), times in todays.items():
        spec = next(each for each in SPECS_TIMED if str(each) == gemm)
        problem = GemmProblem(m, n, k, spec, "90a", 132, True, True)
        legal, chosen = legal_choices(problem), times[fastest_by_estimate(problem)]
        assert chosen <= 1.02 * min(time for choice, time in times.items() if choice in legal), (gemm, m, n, k)
        assert chosen <= 1.06 * min(every[gemm, (m, n, k)]), (gemm, m, n, k)


@pytest.mark.parametrize(
    ("tile", "share"),
    [
        ((2, 1, 256), 1.00), ((2, 1, 192), 0.92), ((2, 2, 128), 0.89), ((1, 1, 128), 0.67),
    ],
)  # fmt: skip
def test_what_shared_memory_lets_through(tile: tuple[int, int, int], share: float) -> None:
    """Of what tensor cores could multiply, worked out by hand: 4,096 products in a clock, 128 bytes in a clock."""
    shape = GemmConfig(*tile, stages=4)
    multiplying = shape.tile_m * shape.tile_n * 128 / 4096
    assert multiplying / gemm_configs.shared_memory_cycles(shape, LLAMA.spec) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(
    ("m", "n", "config", "tiles", "blocks"),
    [
        (256, 512, GemmConfig(2, 1, 256, 4), 4, 4),
        (257, 513, GemmConfig(2, 1, 256, 4), 9, 9),
        (2000, 3000, GemmConfig(2, 1, 256, 4), 192, 11),  # blocks that take tile after tile: as many as there are SMs
        (2000, 3000, MmaConfig(128, 128, 3), 384, 384),
        (1, 1, MmaConfig(64, 64, 4), 1, 1),
    ],
)  # fmt: skip
def test_tiles_and_blocks(m: int, n: int, config: gemm_configs.KernelConfig, tiles: int, blocks: int) -> None:
    """Counted by hand, on a GPU with 11 multiprocessors."""
    problem = replace(LLAMA, m=m, n=n, multiprocessors=11)
    assert gemm_configs.num_tiles(problem, config) == tiles
    assert gemm_configs.num_blocks(problem, config) == blocks


def test_unknown_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gemm_selection.CHOICE_VARIABLE, "cutlass")
    with pytest.raises(ValueError, match=r"LIGHTNING_FP8_GEMM='cutlass' is neither numba nor cublaslt"):
        choose_gemm_on("a card", LLAMA)


def test_what_was_measured_is_taken() -> None:
    """For the same product and sizes that are near; libraries only where nobody names another backend."""
    tile, other, *_ = (choice for choice in legal_choices(LLAMA) if isinstance(choice, GemmConfig))
    name = str(LLAMA.spec)
    near, far = Measurement(name, (6000, 4096, 4096), tile), Measurement(name, (64, 4096, 4096), other)
    assert choose_gemm(LLAMA, [far, near]) == tile
    assert choose_gemm(LLAMA, [far]) is Library.CUBLASLT  # what nobody measured on this card does not replace it
    library = Measurement(name, (8192, 4096, 4096), Library.CUBLASLT)
    assert choose_gemm(LLAMA, [near, library]) is Library.CUBLASLT
    assert choose_gemm(LLAMA, [near, library], "numba") == tile
    illegal = Measurement(name, (8192, 4096, 4096), replace(tile, stages=2))
    assert choose_gemm(LLAMA, [illegal]) is Library.CUBLASLT


def test_measurements_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, str(tmp_path))
    measured_on.cache_clear()
    kept: list[Measurement] = [
        Measurement("one", (1, 2, 3), choice)
        for choice in (GemmConfig(2, 1, 128, 4), MmaConfig(128, 128, 3), Library.CUBLASLT)
    ]
    for each in kept:  # the newest of a problem counts
        path = save("A Card (80 GB)", [each, Measurement("two", (4, 5, 6), Library.REFERENCE)])
        assert measured_on("A Card (80 GB)") == (each, Measurement("two", (4, 5, 6), Library.REFERENCE))
    assert path == tmp_path / "gemm-a-card-80-gb.json"
    assert json.loads(path.read_text())["card"] == "A Card (80 GB)"
    path.write_text(path.read_text()[:-20])
    measured_on.cache_clear()
    assert measured_on("A Card (80 GB)") == ()
    measured_on.cache_clear()


def test_measurements_are_read_as_they_were_written() -> None:
    choices = GemmConfig(2, 1, 128, 4, 1, False, False), MmaConfig(64, 32, 3, True), Library.REFERENCE
    for choice in choices:
        measured = Measurement("e4m3 e4m3 tensor bfloat16", (1, 2, 3), choice)
        entry = json.loads(json.dumps(gemm_measurements.to_json(measured)))
        assert from_json(entry) == measured
    assert gemm_measurements.to_json(Measurement("one", (1, 2, 3), choices[1]))["choice"] == {
        "kind": "MmaConfig", "tile_m": 64, "tile_n": 32, "stages": 3, "even": True
    }  # fmt: skip


def test_files_of_older_versions_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that still exists is taken, whatever else the file names; one that does not is as if it were not timed."""
    older = {
        "kind": "GemmConfig", "mma_warpgroups": 2, "waves": 1, "tile_n": 192, "stages": 4, "cluster": 1,
        "multicast_a": False, "epi_stages": 2, "smem_epilogue": True, "even": True, "pingpong": False,
    }  # fmt: skip
    changes: tuple[dict[str, object], ...] = (
        {}, {"cluster": 2}, {"cluster": 2, "multicast_a": True}, {"pingpong": True}, {"tile_n": 160},
    )  # fmt: skip
    sizes = [(1024 * 8**index, 64, 64) for index in range(len(changes))]
    entries = [
        {"gemm": str(LLAMA.spec), "sizes": each, "choice": older | change} for each, change in zip(sizes, changes)
    ]
    monkeypatch.setattr(gemm_measurements, "cache_folder", lambda: tmp_path)
    path = gemm_measurements.user_file("A Card")
    path.write_text(json.dumps({"card": "A Card", "measured": entries}))
    measured_on.cache_clear()
    chosen = [choose_gemm_on("A Card", replace(LLAMA, m=m, n=n, k=k)) for m, n, k in sizes]
    assert chosen == [GemmConfig(2, 1, 192, 4), *[Library.CUBLASLT] * 4]
    save("A Card", [Measurement("another", (1, 2, 3), Library.REFERENCE)])
    assert choose_gemm_on("A Card", replace(LLAMA, m=1024, n=64, k=64)) == GemmConfig(2, 1, 192, 4)
    measured_on.cache_clear()


def test_the_variable_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op takes the backend that the user names."""
    taken: list[GemmChoice] = []
    chosen = gemm_selection.choose_gemm

    def noted(*args: object) -> GemmChoice:
        taken.append(chosen(*args))  # type: ignore[arg-type]
        return Library.REFERENCE

    monkeypatch.setattr(gemm_selection, "choose_gemm", noted)
    data, scale, *_ = reference_of(quantize_op)(torch.randn(32, 64), Cast(E4M3, Layout.TENSOR))
    for backend, kind in (("numba", GemmConfig), ("cublaslt", Library)):
        monkeypatch.setenv(gemm_selection.CHOICE_VARIABLE, backend)
        plans.clear_plan_cache()
        kernels_of(scaled_mm_op)(data, scale, data, scale, Gemm(Layout.TENSOR, Layout.TENSOR, torch.bfloat16))
        assert isinstance(taken[-1], kind)
    plans.clear_plan_cache()


@pytest.mark.parametrize(
    ("layouts", "why"),
    [
        ("row 1x128", "must both change along K, or neither"),
        ("1x128 tensor", "must both change along K, or neither"),
        ("1x64 1x64", "blocks of 128"),
        ("1x128 1x64", "blocks of 128"),
    ],
)
def test_a_pair_of_layouts_that_kernels_would_scale_wrongly_is_refused(
    layouts: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(spec._BLOCKS_ALONG_K, "1x64", (1, 64))
    with pytest.raises(ValueError, match=why):
        Scaling.__init__(SimpleNamespace(), layouts)  # as if it were another member
