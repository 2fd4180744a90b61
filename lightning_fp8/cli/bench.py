"""``lightning-fp8 bench``: times the GEMMs of a model's layers on this GPU.

    lightning-fp8 bench --linear 4096x14336 --tokens 8192
    lightning-fp8 bench --tune --linear 4096x6144 --linear 4096x4096 --tokens 8192 --recipe blockwise

Each linear layer has three GEMMs: forward, and the gradients of its input and of its weight. For each GEMM, all
valid kernels of this package and of cuBLASLt are timed. ``--tune`` saves the fastest ones for training.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from cuda_kernels.host import launch, proofs
from cuda_kernels.host.gemm_configs import GemmChoice, Library, legal_choices
from cuda_kernels.host.gemm_measurements import Measurement, save
from cuda_kernels.host.gemm_selection import builds_of
from cuda_kernels.host.precompile import compile_ahead, missing
from lightning_fp8.cli.values import LINEAR, TOKENS, count, sizes
from lightning_fp8.numerics.recipes import RECIPES, Recipe, make_recipe
from lightning_fp8.numerics.scaled import Role
from lightning_fp8.ops.cast import quantize_op
from lightning_fp8.ops.gemm import Gemm
from lightning_fp8.ops.gemm_cuda import SCALINGS, BoundGemm, GemmOperand, aligned_operand, bind_gemm, build_gemm
from lightning_fp8.ops.plans import clear_plan_cache

ROUNDS = 21
"""The number of measurements of each choice, of which the median is used."""

Clock = Callable[[Callable[[], object]], float]
"""Measures the seconds of one call."""


@dataclass(frozen=True)
class LayerGemm:
    """One of a layer's products: ``[m, k]`` in role ``a`` times ``[n, k]`` transposed in role ``b``."""

    name: str
    m: int
    n: int
    k: int
    a: Role
    b: Role
    fast: bool


def gemms_of(inputs: int, outputs: int, tokens: int) -> list[LayerGemm]:
    """The products of a linear layer."""
    x, w, dy = Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT
    return [
        LayerGemm(f"{inputs}x{outputs} forward", tokens, outputs, inputs, x, w, True),
        LayerGemm(f"{inputs}x{outputs} input gradient", tokens, inputs, outputs, dy, w, False),
        LayerGemm(f"{inputs}x{outputs} weight gradient", outputs, inputs, tokens, dy, x, False),
    ]


def has_kernels(gemm: LayerGemm, recipe: Recipe) -> bool:
    """Whether there are kernels for the layouts of the recipe; if not, there is nothing to choose from."""
    return (recipe.cast(gemm.a).layout, recipe.cast(gemm.b).layout) in SCALINGS


def bound_gemm(gemm: LayerGemm, recipe: Recipe, device: torch.device) -> BoundGemm:
    """The GEMM with the layouts of the recipe."""
    cast_a, cast_b = recipe.cast(gemm.a), recipe.cast(gemm.b)
    a = GemmOperand.canonical(cast_a.layout, cast_a.float8.dtype, gemm.m, gemm.k)
    b = GemmOperand.canonical(cast_b.layout, cast_b.float8.dtype, gemm.n, gemm.k)
    return bind_gemm(device, a, b, Gemm(a.layout, b.layout, torch.bfloat16, gemm.fast))


def candidates(gemm: LayerGemm, recipe: Recipe, bound: BoundGemm) -> dict[GemmChoice, Callable[[], Tensor]]:
    """The functions that compute the GEMM of random operands, for each choice except the reference."""

    def operand(role: Role, rows: int) -> tuple[Tensor, Tensor]:
        cast = recipe.cast(role)
        x = torch.randn(rows, gemm.k, device=bound.device, dtype=torch.bfloat16)
        data, scale_inv, *_ = quantize_op.call(x, cast, None, None)
        return aligned_operand(data, scale_inv, cast.layout)

    operands = *operand(gemm.a, gemm.m), *operand(gemm.b, gemm.n)

    def call_of(choice: GemmChoice) -> Callable[[], Tensor]:
        built = cache(partial(build_gemm, bound, choice))  # compiled in the first call, whose error is reported
        return lambda: built()(*operands, bound.gemm, None, None)

    return {choice: call_of(choice) for choice in legal_choices(bound.problem) if choice is not Library.REFERENCE}


def timed(calls: dict[GemmChoice, Callable[[], Tensor]], clock: Clock) -> dict[GemmChoice, float]:
    """The median seconds of each choice, fastest first. Choices that fail are left out, and reported in a line."""
    running = {}
    for choice, call in calls.items():
        try:
            call()
            running[choice] = call
        except (RuntimeError, ValueError) as error:
            print(f"  {choice} does not run: {error}")
    rounds = [{choice: clock(call) for choice, call in running.items()} for _ in range(ROUNDS)]
    medians = {choice: statistics.median(times[choice] for times in rounds) for choice in running}
    return dict(sorted(medians.items(), key=lambda item: item[1]))


def card_clock(device: torch.device) -> Clock:
    """The GPU's time of a call, with its operands not in the L2 cache."""
    cold = torch.empty(16 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)

    def seconds(call: Callable[[], object]) -> float:
        cold.zero_()
        began, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        call()
        end.record()
        end.synchronize()
        return began.elapsed_time(end) / 1e3

    return seconds


def bench(
    gemms: Sequence[LayerGemm], recipe: Recipe, device: torch.device, clock: Clock, tune: bool
) -> list[tuple[LayerGemm, dict[GemmChoice, float]]]:
    """Time all products and print the seconds of each one's choices, which it returns, fastest first.

    Raises:
        ValueError: If there are no kernels for the recipe's layouts.
    """
    exact = [gemm.name for gemm in gemms if not has_kernels(gemm, recipe)]
    gemms = [gemm for gemm in gemms if has_kernels(gemm, recipe)]
    if not gemms:
        raise ValueError(
            f"no kernel of this package multiplies recipe={recipe.name!r}: there is nothing to choose from"
        )
    if exact:
        print(f"not timed, since no kernel multiplies them with recipe={recipe.name!r}: {', '.join(exact)}")
    card = launch.name_of(device)
    measured, found = [], []
    planned = [bound_gemm(gemm, recipe, device) for gemm in gemms]
    if launch.is_cuda_device(device):
        architecture = launch.architecture_of(device)
        builds = missing([build for bound in planned for build in builds_of(bound.problem)], architecture)
        for _ in tqdm(compile_ahead(builds, architecture), "compiling", len(builds), unit="kernel"):
            pass
    for gemm, bound in zip(tqdm(gemms, desc=card, unit="product"), planned):
        times = timed(candidates(gemm, recipe, bound), clock)
        tqdm.write("\n".join(_lines(gemm, times)))
        found.append((gemm, times))
        if times:
            measured.append(Measurement(str(bound.problem.spec), (gemm.m, gemm.n, gemm.k), next(iter(times))))
    if tune:
        print(f"kept {len(measured)} choices in {save(card, measured)}")
        clear_plan_cache()
    return found


def plot(found: Sequence[tuple[LayerGemm, dict[GemmChoice, float]]], title: str, path: Path) -> None:
    """Plot the speed of each product's choices. Libraries have another color."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("a plot needs matplotlib; install it: pip install matplotlib") from None
    heights = [1.5 + len(times) for _, times in found]
    figure = Figure(figsize=(9, 0.6 + sum(0.54 + 0.24 * height for height in heights)), layout="constrained")
    axes = figure.subplots(len(found), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    for (gemm, times), axis in zip(found, axes[:, 0]):
        for place, (choice, seconds) in enumerate(times.items()):
            color = "#b45309" if isinstance(choice, Library) else "#0b5cad"
            axis.barh(place, _teraflops(gemm, seconds), color=color)
            axis.annotate(_name(choice), (0, place), (4, 0), textcoords="offset points", va="center", size=7, color="w")
        axis.set_yticks([])
        axis.invert_yaxis()
        axis.set_title(f"{gemm.name}: [{gemm.m}, {gemm.k}] × [{gemm.n}, {gemm.k}]ᵀ", loc="left", size=9)
    axes[-1, 0].set_xlabel("TFLOP/s")
    figure.suptitle(title, size=10)
    figure.savefig(path, dpi=110)


def _name(choice: GemmChoice) -> str:
    return choice.value if isinstance(choice, Library) else f"numba {choice}"


def _teraflops(gemm: LayerGemm, seconds: float) -> float:
    return 2e-12 * gemm.m * gemm.n * gemm.k / seconds


def _lines(gemm: LayerGemm, times: dict[GemmChoice, float]) -> Iterator[str]:
    yield f"{gemm.name}: [{gemm.m}, {gemm.k}] x [{gemm.n}, {gemm.k}]ᵀ"
    for choice, seconds in times.items():
        yield f"  {1e3 * seconds:9.4f} ms  {_teraflops(gemm, seconds):7.0f} TFLOP/s  {_name(choice)}"


def main(argv: Sequence[str]) -> None:
    """``lightning-fp8 bench``."""
    parser = argparse.ArgumentParser(prog="lightning-fp8 bench", description="Time a model's FP8 GEMMs on this GPU.")
    parser.add_argument("--linear", type=sizes, action="append", required=True, metavar="INxOUT", help=LINEAR)
    parser.add_argument("--tokens", type=count, default=8192, help=TOKENS)
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="delayed", help="default: %(default)s")
    parser.add_argument("--tune", action="store_true", help="save the fastest choices for training on this GPU")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the speeds, as PNG or PDF")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("lightning-fp8 bench needs a CUDA GPU, and torch finds none")
    os.environ[proofs.VARIABLE] = "0"  # measure all candidates without a proof; training proves the one that it uses
    device = torch.device("cuda", torch.cuda.current_device())
    gemms = [gemm for inputs, outputs in args.linear for gemm in gemms_of(inputs, outputs, args.tokens)]
    found = bench(gemms, make_recipe(args.recipe), device, card_clock(device), args.tune)
    if args.plot is not None:
        plot(found, f"{launch.name_of(device)}, {args.recipe}, {args.tokens} tokens", args.plot)
