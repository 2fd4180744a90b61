"""Matrix products on hardware: the emulated cases, random shapes against float64, and training of layers."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from torch import nn

from cuda_kernels.gemm.spec import GemmSpec, Scaling
from cuda_kernels.host import gemm_configs, gemm_selection, launch
from cuda_kernels.host.gemm_configs import Library
from lightning_fp8 import FP8FabricPrecision
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.numerics.scaled import Layout
from lightning_fp8.ops import plans
from lightning_fp8.ops.gemm import Gemm, scaled_mm_op
from lightning_fp8.proofs.cases import Case, tile_of
from tests.cuda_kernels.cases.gemm_cases import CASES, PAIRS, GemmProblem, check_product, multiplying
from tests.cuda_kernels.cases.grouped_cases import CASES as GROUPED
from tests.cuda_kernels.cases.kernel_cases import BF16, E4M3, E5M2, FP16, FP32
from tests.gpu.graphs import captured
from tests.tiers import every_row

pytestmark = every_row

CARD = torch.device("cuda", 0)


def fits(case: Case) -> bool:
    """Whether the case's tile is for this GPU: names have more than two numbers on Hopper, two for ``mma.sync``."""
    arch = launch.architecture_of(CARD) if torch.cuda.is_available() else ""
    return arch == "90a" if case.name.split("-")[3].count("/") > 1 else arch in ("89", "120")


@pytest.mark.parametrize("case", [*CASES, *GROUPED], ids=lambda case: case.name)
def test_case(case: Case) -> None:
    if not fits(case):
        pytest.skip("for other GPUs")
    case.run("cuda")


@pytest.fixture(params=["numba", "cublaslt"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(gemm_selection.CHOICE_VARIABLE, request.param)
    plans.clear_plan_cache()
    return str(request.param)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("scaling", PAIRS)
def test_random_shapes(scaling: str) -> None:
    """Compared with float64; small, ragged and large shapes, with each epilogue."""
    choose = random.Random(scaling)
    for _ in range(12):
        shape = tuple(choose.choice((1, 16, 33, 64, 127, 128, 250, 1000, 1536, 2049)) for _ in range(3))
        accumulate = choose.random() < 0.3
        check_product(
            scaling,
            shape,  # type: ignore[arg-type]
            "cuda",
            formats=choose.choice([(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]),
            out=FP32 if accumulate else choose.choice([BF16, FP16, FP32]),
            bias=None if accumulate else choose.choice([None, BF16]),
            accumulate=accumulate,
            fast=choose.random() < 0.5,
            # Exact sums fit the short accumulator; with other values only promoted sums could be compared.
            exact=True,
        )


def test_every_plan_of_a_problem() -> None:
    """All legal tiles give the same bits."""
    card = launch.architecture_of(CARD), launch.multiprocessors(CARD)
    product = GemmSpec("e4m3", "e4m3", Scaling.TENSOR, "bfloat16")
    problem = GemmProblem(1000, 1040, 1500, product, *card, out_aligned=True, even=True)
    for plan in gemm_configs.legal_choices(problem):
        if not isinstance(plan, Library):
            with multiplying(problem.architecture, *tile_of(plan)):
                check_product("tensor", (1000, 1040, 1500), "cuda")


@pytest.mark.usefixtures("backend")
def test_more_than_2_31_elements() -> None:
    """Rows of A and of the result beyond 2**31 bytes and elements."""
    a = torch.ones(140_000, 16_384, device="cuda", dtype=BF16).to(E4M3)
    a[-1] = 2.0
    b, one = torch.ones(16_384, 16_384, device="cuda", dtype=BF16).to(E4M3), torch.ones((), device="cuda")
    out = scaled_mm_op(a, one, b, one, Gemm(Layout.TENSOR, Layout.TENSOR, BF16), None)
    assert out.numel() > 2**31
    assert bool((out[-1] == 32_768).all())
    assert bool((out[-2] == 16_384).all())
    assert bool((out[0] == 16_384).all())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_trains_as_on_the_cpu(recipe: str) -> None:
    """Compares losses and gradients of a few steps on the GPU and on the CPU."""
    losses = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(192, 384), nn.GELU(), nn.Linear(384, 192))
        plugin = FP8FabricPrecision(recipe=recipe, first_last_layers_bf16=False)  # type: ignore[arg-type]
        plugin.convert_module(model)
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        x = torch.randn(160, 192, generator=torch.Generator().manual_seed(1)).to(device, BF16)
        of_device = []
        for _ in range(6):
            with plugin.forward_context():
                loss = (model(x) - x).float().square().mean()
            loss.backward()
            plugin.update_scales()
            optimizer.step()
            optimizer.zero_grad()
            of_device.append(loss.item())
        losses.append(of_device)
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=2e-2, atol=0.0)
    assert losses[1][-1] < losses[1][0]


BACKWARD_FIRST = """
import torch
from lightning_fp8 import Linear, fp8_autocast
layer, x = Linear(256, 256, device="cuda"), torch.randn(256, 256, device="cuda", requires_grad=True)
with fp8_autocast(fp8_recipe="delayed"):
    y = layer(x)
dy = torch.ones_like(y)
kept = torch.empty(1 << 26, device="cuda")  # backward's own memory comes from what is freed here
del kept
torch.cuda.synchronize()
y.backward(dy)
assert x.grad.isfinite().all() and x.grad.abs().sum() > 0
"""


def test_backward_whose_first_work_is_ours() -> None:
    """The autograd thread has no CUDA context before its first call, which is one of our kernels."""
    done = subprocess.run([sys.executable, "-c", BACKWARD_FIRST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("backend")
def test_a_product_in_a_graph() -> None:
    a = torch.randint(-3, 4, (300, 512), device="cuda").to(E4M3)
    b, one = torch.randint(-3, 4, (256, 512), device="cuda").to(E4M3), torch.ones((), device="cuda")

    def multiply() -> torch.Tensor:
        return scaled_mm_op(a, one, b, one, Gemm(Layout.TENSOR, Layout.TENSOR, FP32), None)

    graph, out = captured(multiply)
    for seed in range(3):
        torch.manual_seed(seed)
        a.copy_(torch.randint(-3, 4, (300, 512), device="cuda").to(E4M3))
        graph.replay()
        assert torch.equal(out, (a.double() @ b.double().t()).float())
