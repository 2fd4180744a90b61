"""Attention over codes of keys and values, as a card runs it for context parallelism."""

from __future__ import annotations

import torch

from lightning_fp8.attention.ops import Attention, AttentionCall, Band, attention_cast
from lightning_fp8.attention.ops.codes import reference_attention_cast, reference_attention_forward_of_codes
from lightning_fp8.attention.ops.cuda import attention_cast_on_cuda, attention_forward_of_codes_on_cuda
from lightning_fp8.ops.plans import clear_plan_cache
from tests.cuda_kernels.emulated import Emulator, needs_compilers


@needs_compilers
def test_codes_of_keys_give_what_the_specification_gives(emulator: Emulator) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, rows, heads, 64, generator=generator) for rows, heads in ((100, 2), (256, 1), (256, 1)))
    call = AttentionCall(Attention("bshd", Band(right=0, bottom_right=True), False))
    clear_plan_cache()
    k8, v8 = attention_cast_on_cuda(k), attention_cast_on_cuda(v)
    for codes, x in ((k8, k), (v8, v)):
        for actual, expected in zip(codes, reference_attention_cast(x), strict=True):
            assert torch.equal(actual.float(), expected.float())
    q = q.bfloat16()
    o, kept = attention_forward_of_codes_on_cuda(q, *k8, *v8, 256, call)
    clear_plan_cache()
    right_o, right = reference_attention_forward_of_codes(q, *attention_cast(k), *attention_cast(v), 256, call)
    launched = [kernel.function.__name__ for kernel in emulator.launched]
    assert launched == ["quantize_heads", "quantize_heads", "quantize_heads", "transpose_heads", "attention_forward"]
    assert (o.float() - right_o.float()).norm() <= 5e-3 * right_o.float().norm()
    torch.testing.assert_close(kept.m, right.m, rtol=1e-3, atol=1e-3)
    assert torch.equal(kept.q8.float(), right.q8.float())
