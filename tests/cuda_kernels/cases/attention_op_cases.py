"""Attention's ops on a device that runs kernels, from a model's tensors to gradients, against those on the CPU."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from lightning_fp8.attention.ops import Band, Gradients, Kept
from lightning_fp8.attention.ops.cuda import attention_backward_on_cuda, attention_forward_on_cuda
from lightning_fp8.ops.plans import clear_plan_cache
from lightning_fp8.proofs.attention import Problem, check_backward, check_forward
from lightning_fp8.proofs.cases import Case
from lightning_fp8.proofs.comparing import nan_in_new_memory


def run_ops(problem: Problem, device: str) -> tuple[Tensor, Kept, Gradients]:
    """Both ops as ``device`` runs them, the second with what the first kept."""
    (q, k, v, do), call = problem.tensors(device), problem.call(device)
    clear_plan_cache()
    with nan_in_new_memory():
        o, kept = attention_forward_on_cuda(q, k, v, call)
        gradients = attention_backward_on_cuda(do, o, kept, problem.rows(1), call)
    clear_plan_cache()
    return o, kept, gradients


def check_ops(problem: Problem, device: str) -> None:
    """What the CPU gives, the second op also of what the first one kept on ``device``."""
    clear_plan_cache()
    check_backward(problem, device, check_forward(problem, device))
    clear_plan_cache()


PROBLEMS = {
    "bshd grouped bottom right": Problem(
        "bshd", ((100, 200),), heads=(2, 1), band=Band(right=0, bottom_right=True), uniform=True
    ),
    "sbhd window": Problem("sbhd", ((140, 20), (60, 130)), channels=128, band=Band(left=40, right=20), tail=2),
    "thd": Problem(
        "thd", ((1, 60), (130, 3), (0, 5), (40, 129)), heads=(2, 2), band=Band(right=0), tail=140, shared=True
    ),
}
CASES = [Case(f"attention_ops-{name}", partial(check_ops, problem)) for name, problem in PROBLEMS.items()]
KERNELS = [
    "quantize_heads", "sum_heads", "mean_heads", "quantize_heads", "quantize_heads", "attention_forward",
    "transpose_heads", "transpose_heads", "quantize_gradients", "attention_dq", "attention_dkv",
]  # fmt: skip
"""What both ops start, in this order."""
