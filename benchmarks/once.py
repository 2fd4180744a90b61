"""A single call of what a suite times, for a profiler: ``python -m benchmarks.once "cast + transposed"``.

A cast runs on the first shape of suite ``casts``; a product with the kernel selected by ``LIGHTNING_FP8_GEMM``; a pass
of attention on the first problem of suite ``attention``. The profiler is given the kernel's name.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.contenders import operations
from benchmarks.contenders.attention_contenders import Ops
from benchmarks.contenders.attention_problems import BACKWARD, FORWARD, inputs
from benchmarks.contenders.operations import Call
from benchmarks.measuring.plan import Plan
from benchmarks.suites import attention, casts, products
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.ops.gemm import Gemm, scaled_mm_op

ATTENTION = {"attention forward": FORWARD, "attention dQ": BACKWARD, "attention dK and dV": BACKWARD}
"""The pass in which each kernel runs."""


def prepared(name: str, plan: Plan) -> Callable[[], Any]:
    """The call named ``name``.

    Raises:
        ValueError: the name is unknown; the message lists all names.
    """
    works = {work.name: work for work in (products.TINY if plan.dry else products.FULL) if not work.accumulate}
    calls = {each.name: each for each in (*operations.casts(E4M3.dtype), *operations.fused(E4M3.dtype))}
    if name in calls:
        shape = (casts.TINY if plan.dry else casts.FULL).casts[0]
        return Call(calls[name], torch.randn(shape, device=plan.device).bfloat16())
    if name in works:
        work = works[name]
        layouts = products.PAIRS[work.scaling]
        left, right = products.operands(work, plan)
        gemm = Gemm(*layouts, work.out, work.fast)
        return lambda: scaled_mm_op.call(left.data, left.scale_inv, right.data, right.scale_inv, gemm, None)
    if name in ATTENTION:
        problem = (attention.TINY if plan.dry else attention.FULL)[0]
        return Ops(problem, inputs(problem, plan.device)).prepared(ATTENTION[name])
    raise ValueError(f"{name!r} is not one of {', '.join(map(repr, (*calls, *works, *ATTENTION)))}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.once", description="Call once what a suite times.")
    parser.add_argument("name")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU with tiny tensors")
    args = parser.parse_args()
    device = torch.device("cpu") if args.dry_run else torch.device("cuda", 0)
    try:
        call = prepared(args.name, Plan(device, args.dry_run))
    except ValueError as error:
        parser.error(str(error))
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
