"""DotProductAttention where things go wrong: NaN in padding, lengths that do not fit, devices, dtypes, batches."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import DotProductAttention, Linear, fp8_autocast, make_recipe
from lightning_fp8.attention.ops import Band
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.fp8_region import FP8Context, fp8_context
from lightning_fp8.numerics.scaled import Role
from tests.attention.attention_modules import (
    Batch,
    cu_seqlens,
    drawn_batch,
    of_definition,
    padding_of,
    run,
    taken_apart,
)

FP8 = {"name": "delayed", "fp8_dpa": True, "amax_history_len": 4}


class Block(nn.Module):
    """Built, not converted: each layer has a history of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.attention = Linear(16, 48), DotProductAttention(2, 8, qkv_format="bshd")

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(*self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(-3))


# ---------------------------------------------------------------------------------------------- delayed scaling's slots


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_attentions_rows_are_updated_as_often_as_linears(micro_batches: int) -> None:
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        for _ in range(micro_batches):
            with fp8_autocast(fp8_recipe=FP8):
                y = model(torch.randn(2, 5, 16))
            y.sum().backward()
        optimizer.step()
    assert model.qkv.history is not model.attention.history
    assert model.attention.history.updates == model.qkv.history.updates
    assert model.attention.history.watch.stepped


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_calibration_brings_the_rows_where_the_tensors_are(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = DotProductAttention(2, 8, qkv_format="bshd")
    module.history.scale = torch.zeros(6, device="meta")  # stands for slots that lie elsewhere
    moved: list[torch.device] = []
    monkeypatch.setattr(AmaxHistory, "to", lambda self, device: moved.append(device))
    q, k, v = torch.randn(3, 1, 5, 2, 8)
    context = FP8Context(make_recipe({"name": recipe, "fp8_dpa": True}), enabled=False, calibrating=True)
    with fp8_context(context):
        module(q, k, v)
    assert moved == [torch.device("cpu")]
    assert (module.history.recipe is context.recipe) == (recipe == "delayed")


def test_rows_move_with_a_module_that_has_no_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    module, moved = DotProductAttention(2, 8), []
    monkeypatch.setattr(AmaxHistory, "to", lambda self, device: moved.append(device))
    card = torch.device("cuda", 0)
    module._apply(lambda x: SimpleNamespace(device=card))
    module.half()
    module.to("meta")
    assert moved == [card, torch.device("cpu")]


@pytest.mark.parametrize("calibrating", [False, True])
def test_meta_tensors_are_not_observed(calibrating: bool) -> None:
    module, q = DotProductAttention(2, 8, qkv_format="bshd"), torch.empty(1, 5, 2, 8, device="meta")
    with fp8_autocast(not calibrating, calibrating=calibrating, fp8_recipe=FP8):
        o = module(q, q, q)
    assert o.is_meta
    assert o.shape == (1, 5, 16)
    assert module.history.scale.device == torch.device("cpu")
    assert not module.history.amax.any()


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)])
def test_gradients_that_nobody_asks_for_are_not_observed(needed: tuple[int, ...]) -> None:
    module, qkv = DotProductAttention(2, 8, qkv_format="bshd"), [*torch.randn(3, 1, 5, 2, 8)]
    qkv[0] *= 4.0  # dq, dk and dv are of different sizes
    leaves = [x.requires_grad_(index in needed) for index, x in enumerate(qkv)]
    with fp8_autocast(fp8_recipe=FP8):
        o = module(*leaves)
    o.sum().backward()
    largest = max(leaves[index].grad.abs().max() for index in needed)
    assert module.slots[Role.DQKV].amax == largest


# ------------------------------------------------------------------------------------------------------ high precision


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one"])
@pytest.mark.parametrize("mask", ["padding", "padding_causal"])
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd"])
def test_nan_in_padding_stays_there_in_high_precision(qkv_format: str, mask: str, softmax_type: str) -> None:
    lengths = [(7, 9), (3, 5)]
    queries, keys = zip(*lengths)
    x = drawn_batch(lengths, 2, 1, 8, torch.float32)
    module, bshd = (
        DotProductAttention(2, 8, num_gqa_groups=1, qkv_format=each, attn_mask_type=mask, softmax_type=softmax_type)
        for each in (qkv_format, "bshd")
    )
    given = {"cu_seqlens_q": cu_seqlens(queries), "cu_seqlens_kv": cu_seqlens(keys)}
    found = run(module, x, qkv_format, math.nan, **given)
    plain = "causal" if "causal" in mask else "no_mask"
    alone = [run(bshd, Batch(*([each] for each in sequence)), "bshd", attn_mask_type=plain) for sequence in zip(*x)]
    for each, n, right in zip(found, (queries, queries, keys, keys), zip(*alone)):
        for rows, expected in zip(taken_apart(each, n, qkv_format), right):
            torch.testing.assert_close(rows, expected[0])
        for rows in padding_of(each, n, qkv_format):
            assert torch.equal(rows, torch.zeros_like(rows))


# ------------------------------------------------------------------------------------------------ lengths and dtypes


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("qkv_format", "starts", "message"),
    [
        ("bshd", [0, 60, 80], r"cu_seqlens_q=\[0, 60, 80\] has a sequence of length 60; the tensor has 40 rows"),
        ("sbhd", [0, 40, 81], "has a sequence of length 41; the tensor has 40 rows"),
        ("bshd", [0, 30, 20], r"cu_seqlens_q=\[0, 30, 20\] does not rise from 0"),
        ("bshd", [5, 25, 45], r"cu_seqlens_q=\[5, 25, 45\] does not rise from 0"),
        ("thd", [5, 25, 40], "does not rise from 0"),
        ("thd", [0, 25, 41], "ends at row 41; the tensor has 40 rows"),
    ],
)
def test_starts_of_sequences_that_do_not_fit(qkv_format: str, starts: list[int], message: str, enabled: bool) -> None:
    shape = {"bshd": (2, 40, 2, 8), "sbhd": (40, 2, 2, 8), "thd": (40, 2, 8)}[qkv_format]
    q, k, v = torch.randn(3, *shape)
    module = DotProductAttention(2, 8, qkv_format=qkv_format, attn_mask_type="padding")
    with pytest.raises(ValueError, match=message), fp8_autocast(enabled, fp8_recipe=FP8):
        module(q, k, v, cu_seqlens_q=torch.tensor(starts))


@pytest.mark.parametrize("enabled", [True, False])
def test_one_dtype_unless_torch_autocast_makes_it_one(enabled: bool) -> None:
    module = DotProductAttention(2, 8, qkv_format="bshd")
    q, k, v = torch.randn(3, 1, 5, 2, 8)
    told = r"torch\.float32, torch\.bfloat16 and torch\.bfloat16; give all in one dtype"
    with pytest.raises(TypeError, match=told), fp8_autocast(enabled, fp8_recipe=FP8):
        module(q, k.bfloat16(), v.bfloat16())
    with fp8_autocast(enabled, fp8_recipe=FP8), torch.autocast("cpu", torch.bfloat16):
        assert module(q, k.bfloat16(), v.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("tail", [(20, 20), (0, 150)])
def test_rows_behind_the_last_sequence_are_padding(tail: tuple[int, int], enabled: bool) -> None:
    lengths = [(25, 25), (150, 130)]
    queries, keys = zip(*lengths)
    x = drawn_batch(lengths, 2, 1, 16)
    of_rows = (tail[0], tail[1], tail[1], tail[0])
    longer = Batch(*([*each, each[0].new_full((n, *each[0].shape[1:]), math.nan)] for each, n in zip(x, of_rows)))
    module = DotProductAttention(2, 16, num_gqa_groups=1, qkv_format="thd", attn_mask_type="padding_causal")
    given = {"cu_seqlens_q": cu_seqlens(queries), "cu_seqlens_kv": cu_seqlens(keys)}
    with fp8_autocast(enabled, fp8_recipe={"name": "tensorwise", "fp8_dpa": True}):
        right, found = (run(module, each, "thd", **given) for each in (x, longer))
    for one, other, rows in zip(right, found, (queries, queries, keys, keys)):
        assert torch.equal(other[: sum(rows)], one)
        assert torch.equal(other[sum(rows) :], torch.zeros_like(other[sum(rows) :]))
    assert [len(each) for each in found] == [175 + tail[0], 175 + tail[0], 155 + tail[1], 155 + tail[1]]


# ------------------------------------------------------------------------------------------------------ keys' mean


@pytest.mark.parametrize(
    ("window", "far", "rows", "center_keys", "least", "most"),
    [
        ((-1, 0), -1, slice(128), True, 0.0, 0.06),
        ((64, 0), 0, slice(128, None), True, 0.4, 0.7),
        ((64, 0), 0, slice(128, None), False, 0.0, 0.06),
    ],
    ids=["later", "first", "first, keys as they are"],
)
def test_a_key_that_rows_never_see(
    window: tuple[int, int], far: int, rows: slice, center_keys: bool, least: float, most: float
) -> None:
    """A later one spoils nothing under a causal mask; a first one does in a window, as docs/attention.md says."""
    x = drawn_batch([(256, 256)], 2, 2, 64)
    x.k[0][far] = 3000.0
    module = DotProductAttention(2, 64, qkv_format="bshd", window_size=window, center_keys=center_keys)
    with fp8_autocast(fp8_recipe={"name": "tensorwise", "fp8_dpa": True}):
        o = run(module, x, "bshd")[0][0, rows].double()
    truth = of_definition(x, Band(None if window[0] < 0 else window[0], 0))[0][rows]
    assert least <= (o - truth).norm() / truth.norm() <= most


def test_center_keys_is_a_bool() -> None:
    with pytest.raises(TypeError, match="center_keys='no' must be True or False"):
        DotProductAttention(2, 64, center_keys="no")
