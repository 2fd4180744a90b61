"""Suite ``experts``: grouped GEMMs and whole layers of experts, compared with torch's in BF16 and in FP8.

Groups are balanced, or ragged: every eighth expert has no row, and of the others each has a little more than the one
before it. Results are first compared with float64.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.experts_time import SHAPES, Shape
from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import OURS, Candidate, Result, said
from benchmarks.measuring.side_by_side import timed
from benchmarks.measuring.timing import Contender
from benchmarks.suites.layers import BF16
from lightning_fp8 import FP8FabricPrecision, make_recipe, ops
from lightning_fp8.functions.grouped import MANY_EXPERTS
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.numerics.scaled import Role, ScaledTensor
from lightning_fp8.ops.grouped import Casts, groups_of
from lightning_fp8.ops.torch_scaled_mm import multiplies_mx_blocks

SECONDS = 0.05
"""Measuring time per contender."""
TORCH = "torch._scaled_grouped_mm"
TINY = (Shape("few", 4, 32, 48, 96), Shape("many", MANY_EXPERTS + 1, 32, 48, 132))
LIMITS = {BF16: 0.01, TORCH: 0.1, OURS: 0.1}
"""Relative errors (Frobenius) against float64, of operands that are normally distributed."""
WITH_CASTS = "rowwise", "blockwise", "mxfp8"
"""Recipes whose wgrad casts its operands along the rows of each group."""


def unavailable(plan: Plan) -> str | None:
    return None if plan.dry or plan.device.type == "cuda" else "needs a CUDA device"


def run(plan: Plan) -> Iterator[Result]:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # no tables of layers
    for shape in TINY if plan.dry else SHAPES:
        for ragged in (False, True):
            groups = "ragged" if ragged else "balanced"
            offs = ends(shape, ragged).to(plan.device)
            plan.say(f"experts: {shape.name}, {groups}")
            for way in (fprop, dgrad, wgrad):
                named = f"{way.__name__}, {shape.name}, {groups}"
                yield from timed(plan, list(way(named, shape, offs, plan)), (BF16, TORCH), SECONDS)
            named = f"layer, forward and backward, {shape.name}, {groups}"
            yield from timed(plan, list(layer(named, shape, offs, plan)), (BF16,), SECONDS)


def ends(shape: Shape, ragged: bool) -> Tensor:
    """The ends of the groups, int32 ``[E]``."""
    share = torch.ones(shape.experts)
    if ragged:
        share = torch.linspace(0.5, 1.5, shape.experts)
        share[1::8] = 0
    counts = (share / share.sum() * shape.rows).long()
    counts[-1] += shape.rows - counts.sum()
    return counts.cumsum(0).to(torch.int32)


def recipes(plan: Plan) -> list[str]:
    """Those that multiply in FP8 on this device."""
    return [name for name in RECIPES if name != "mxfp8" or plan.dry or multiplies_mx_blocks(plan.device)]


# --- The three GEMMs of the first matrix ------------------------------------------------------------------------------


def fprop(name: str, shape: Shape, offs: Tensor, plan: Plan) -> Iterator[Candidate]:
    """``[T, H]`` by ``[E, 2 I, H]``; operands are cast before."""
    x, w, _ = tensors(shape, plan)
    yield from _along_rows(name, x, w, offs, plan, Role.INPUT)


def dgrad(name: str, shape: Shape, offs: Tensor, plan: Plan) -> Iterator[Candidate]:
    """``[T, 2 I]`` by ``[E, H, 2 I]``; operands are cast before."""
    _, w, dy = tensors(shape, plan)
    yield from _along_rows(name, dy, w.mT, offs, plan, Role.GRAD_OUTPUT)


def wgrad(name: str, shape: Shape, offs: Tensor, plan: Plan) -> Iterator[Candidate]:
    """``[2 I, T]`` by ``[T, H]`` for each group; with the casts, or transposes of codes, along its rows."""
    x, w, dy = tensors(shape, plan)
    right = torch.stack([dy[rows].double().t() @ x[rows].double() for rows in _few_groups(offs)])
    few = partial(_few_of_groups, offs=offs)
    flops = 2 * x.shape[0] * w.shape[1] * w.shape[2]
    result = Result(name, BF16, (*dy.shape, x.shape[1]), "bfloat16", flops=flops)
    yield _checked(result, partial(torch._grouped_mm, dy.t(), x, offs=offs), right, few)
    for recipe_name in recipes(plan)[1:]:  # without delayed, whose codes have one scale, as those of tensorwise
        recipe = make_recipe(recipe_name)
        casts = Casts(recipe.cast(Role.GRAD_OUTPUT), recipe.cast(Role.INPUT))
        a: Any = dy if recipe_name in WITH_CASTS else ops.quantize(dy, casts.dy).rowwise
        b: Any = x if recipe_name in WITH_CASTS else ops.quantize(x, casts.x).rowwise
        call = partial(ops.grouped_wgrad, a, b, offs, casts, out_dtype=torch.bfloat16)
        yield _checked(replace(result, by=_ours(recipe_name), dtype="float8_e4m3fn"), call, right, few)
    if shape.experts > MANY_EXPERTS:
        call = partial(ops.grouped_wgrad_in_high_precision, dy, x, offs, out_dtype=torch.bfloat16)
        yield _checked(replace(result, by=f"{OURS}, many experts"), call, right, few)


def _along_rows(name: str, a: Tensor, b: Tensor, offs: Tensor, plan: Plan, role: Role) -> Iterator[Candidate]:
    """``a [T, K]`` by ``b [E, N, K]``: BF16, torch's grouped GEMM of rows' scales, and each recipe."""
    rows = torch.linspace(0, len(a) - 1, 16).long().unique().to(a.device)
    groups = torch.searchsorted(offs, rows, right=True)
    right = torch.stack([b[group].double() @ a[row].double() for group, row in zip(groups.tolist(), rows)])
    flops = 2 * len(a) * b.shape[1] * b.shape[2]
    result = Result(name, BF16, (len(a), *b.shape[1:]), "bfloat16", flops=flops)

    def few(y: Tensor) -> Tensor:
        return y[rows]

    yield _checked(result, partial(torch._grouped_mm, a, b.mT, offs=offs), right, few)
    result = replace(result, dtype="float8_e4m3fn")
    for recipe_name in recipes(plan)[1:]:  # without delayed, whose codes have one scale, as those of tensorwise
        recipe = make_recipe(recipe_name)
        try:
            a8 = ops.quantize(a, recipe.cast(Role.INPUT if recipe_name == "rowwise" else role)).rowwise
            b8 = ops.quantize_experts(b.contiguous(), recipe.cast(Role.WEIGHT)).rowwise
            assert a8 is not None
            assert b8 is not None
        except Exception as error:
            yield Candidate(replace(result, by=_ours(recipe_name), correct=False, note=said(error)), None)
            continue
        fast = role is Role.INPUT
        if recipe_name == "rowwise":
            yield _checked(replace(result, by=TORCH), _torch(a8, b8, offs, fast), right, few)
        call = partial(ops.grouped_mm, a8, b8, offs, out_dtype=torch.bfloat16, fast_accum=fast)
        yield _checked(replace(result, by=_ours(recipe_name)), call, right, few)


def _torch(a: ScaledTensor, b: ScaledTensor, offs: Tensor, fast: bool) -> Callable[[], Tensor]:
    operands = a.data, b.data.mT, a.scale_inv.flatten(), b.scale_inv.flatten(1)
    return partial(torch._scaled_grouped_mm, *operands, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=fast)


def tensors(shape: Shape, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Normally distributed ``x [T, H]``, ``w [E, 2 I, H]`` and ``dy [T, 2 I]``."""
    generator = torch.Generator(plan.device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=plan.device, dtype=torch.bfloat16)

    experts, hidden, inner, rows = shape[1:]
    return normal(rows, hidden), normal(experts, 2 * inner, hidden), normal(rows, 2 * inner)


def _few_groups(offs: Tensor) -> list[slice]:
    """The rows of the first and of the last group that has any."""
    groups = [slice(start, end) for _, start, end in groups_of(offs)]
    return [groups[0], groups[-1]]


def _few_of_groups(dw: Tensor, offs: Tensor) -> Tensor:
    groups = [group for group, *_ in groups_of(offs)]
    return dw[[groups[0], groups[-1]]]


def _checked(result: Result, call: Callable[[], Tensor], right: Tensor, few: Callable[[Tensor], Tensor]) -> Candidate:
    """Compare ``few`` of the result with ``right``; a failure is recorded, and must not discard the others' numbers."""
    by = result.by.partition(",")[0]
    try:
        error = float((few(call()).double() - right).norm() / right.norm())
    except Exception as failure:  # on the CPU torch has no grouped GEMM in FP8
        return Candidate(replace(result, correct=False if by == OURS else None, note=said(failure)), None)
    return Candidate(replace(result, correct=error <= LIMITS[by], errors={"result": error}), Contender(call))


def _ours(recipe: str) -> str:
    """Of grouped GEMMs the name alone is that of codes with one scale, as ``delayed`` and ``tensorwise`` have them."""
    return OURS if recipe == "tensorwise" else f"{OURS}, {recipe}"


# --- The layer --------------------------------------------------------------------------------------------------------


def layer(name: str, shape: Shape, offs: Tensor, plan: Plan) -> Iterator[Candidate]:
    """Mixtral's experts of transformers, whose BF16 is ``F.grouped_mm``; with casts and the update of scales."""
    flops = 3 * 2 * shape.rows * 3 * shape.hidden * shape.inner
    for recipe in (None, *recipes(plan)):
        by = BF16 if recipe is None else OURS if recipe == "delayed" else f"{OURS}, {recipe}"
        result = Result(name, by, (shape.rows, shape.hidden, shape.inner), "bfloat16", flops=flops)
        try:
            call = _step(shape, offs, recipe, plan)
            call()
        except ImportError as error:
            yield Candidate(replace(result, note=f"absent: {error}"), None)
        except Exception as error:
            yield Candidate(replace(result, correct=False, note=said(error)), None)
        else:
            yield Candidate(result, Contender(call))


def _step(shape: Shape, offs: Tensor, recipe: str | None, plan: Plan) -> Callable[[], None]:
    """A function that runs forward and backward; each token goes to one expert."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(num_local_experts=shape.experts, hidden_size=shape.hidden, intermediate_size=shape.inner)
    config._experts_implementation = "grouped_mm"
    with torch.device(plan.device):
        model = nn.ModuleDict({"experts": MixtralExperts(config).bfloat16()})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    plugin = FP8FabricPrecision(recipe=recipe, first_last_layers_bf16=False) if recipe else None  # type: ignore[arg-type]
    if plugin is not None:
        plugin.convert_module(model)
    x = torch.randn(shape.rows, shape.hidden, device=plan.device, dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn_like(x)
    chosen = torch.searchsorted(offs, torch.arange(shape.rows, device=plan.device), right=True)[:, None]
    weights = torch.ones_like(chosen, dtype=torch.bfloat16)

    def step() -> None:
        if plugin is None:
            model["experts"](x, chosen, weights).backward(dy)
        else:
            with plugin.forward_context():
                model["experts"](x, chosen, weights).backward(dy)
            plugin.update_scales()
        for tensor in (x, *model.parameters()):
            tensor.grad = None

    return step
