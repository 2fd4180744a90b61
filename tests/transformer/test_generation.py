"""Generation step by step with a cache of keys and values equals the forward of whole sequences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import InferenceParams, RotaryPositionEmbedding, TransformerLayer
from tests.transformer.layer_cases import draw

ROTARY = RotaryPositionEmbedding(8)(16)


def layers(qkv_format: str, **options: object) -> nn.ModuleList:
    """Two layers, which share no cache although neither has a number."""
    torch.manual_seed(1)
    made = nn.ModuleList(
        TransformerLayer(32, 48, 4, num_gqa_groups=2, attn_input_format=qkv_format, **options) for _ in range(2)
    )
    draw(made)
    return made.eval()


def forward(model: nn.ModuleList, x: Tensor, **call: object) -> Tensor:
    for layer in model:
        x = layer(x, rotary_pos_emb=ROTARY, **call)
    return x


@pytest.mark.parametrize("counted_by", ["pre_step", "sequence_len_offset"])
@pytest.mark.parametrize(
    ("qkv_format", "options"),
    [
        ("sbhd", {}),
        ("bshd", {"rotary_pos_interleaved": True, "window_size": (2, 0)}),
        ("bshd", {"self_attn_mask_type": "padding_causal", "softmax_type": "learnable"}),
    ],
)
@torch.no_grad()
def test_a_prompt_then_row_by_row(qkv_format: str, options: dict[str, object], counted_by: str) -> None:
    time = 0 if qkv_format == "sbhd" else 1
    model = layers(qkv_format, **options)
    x = torch.randn((9, 3, 32) if time == 0 else (3, 9, 32))
    whole = forward(model, x, self_attn_mask_type="causal")
    params, parts = InferenceParams(4, 12, 2, 8, torch.float32), []
    params.allocate_memory(1)
    assert params.is_paged is False
    for rows in x.split([4, 2, 1, 1, 1], time):
        if counted_by == "pre_step":
            params.pre_step(dict.fromkeys("abc", rows.shape[time]))
        parts.append(forward(model, rows, inference_params=params))
        if counted_by == "sequence_len_offset":
            params.sequence_len_offset += rows.shape[time]
    torch.testing.assert_close(torch.cat(parts, time), whole)


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd", "thd"])
@torch.no_grad()
def test_sequences_of_different_lengths_come_and_go(qkv_format: str) -> None:
    model = layers(qkv_format, self_attn_mask_type="padding_causal")
    sequences = {name: torch.randn(8, 32) for name in "abcd"}
    single = layers("bshd", self_attn_mask_type="causal")
    whole = {name: forward(single, x[None])[0] for name, x in sequences.items()}
    params, done = InferenceParams(3, 8, qkv_format=qkv_format), dict.fromkeys("abcd", 0)
    steps = [{"a": 3, "b": 1, "c": 2}, {"a": 1, "b": 1, "c": 1}, {"c": 1, "a": 2}, {"d": 5, "c": 1, "a": 2}]
    for step in [*steps, {"a": 0, "d": 3}]:
        params.pre_step(step)
        assert params.get_seqlens_pre_step().tolist() == [done[name] for name in step]
        rows = [sequences[name][done[name] : done[name] + new] for name, new in step.items()]
        if qkv_format == "thd":
            parts = forward(model, torch.cat(rows), inference_params=params).split([*step.values()])
        else:
            batch_first = qkv_format == "bshd"
            y = forward(model, nn.utils.rnn.pad_sequence(rows, batch_first), inference_params=params)
            parts = [row[:new] for row, new in zip(y if batch_first else y.transpose(0, 1), step.values())]
        for (name, new), part in zip(step.items(), parts):
            torch.testing.assert_close(part, whole[name][done[name] : done[name] + new], msg=f"{name} in {step}")
            done[name] += new


@torch.no_grad()
def test_a_decoder_looks_at_the_whole_encoder_in_each_step() -> None:
    model = layers("bshd", layer_type="decoder")
    x, encoder = torch.randn(2, 6, 32), torch.randn(2, 9, 32)
    whole = forward(model, x, encoder_output=encoder)
    params, parts = InferenceParams(2, 6), []
    for rows in x.split(2, 1):
        parts.append(forward(model, rows, encoder_output=encoder, inference_params=params))
        params.sequence_len_offset += 2
    torch.testing.assert_close(torch.cat(parts, 1), whole)


@torch.no_grad()
def test_what_is_forgotten_is_used_again() -> None:
    model, x, params = layers("sbhd"), torch.randn(5, 1, 32), InferenceParams(1, 5)
    first = forward(model, x, inference_params=params)
    params.sequence_len_offset = 5
    with pytest.raises(ValueError, match=r"1 rows for sequence 0, which has 5, do not fit max_sequence_length=5"):
        forward(model, x[:1], inference_params=params)
    params.reset()
    params.pre_step({"new": 5})
    assert torch.equal(forward(model, x, inference_params=params), first)


@pytest.mark.parametrize("counted_by", ["pre_step", "sequence_len_offset"])
@torch.no_grad()
def test_a_module_that_two_layers_share_overwrites_no_rows(counted_by: str) -> None:
    layer, x = layers("sbhd")[0], torch.randn(4, 1, 32)
    whole = layer(layer(x))
    caches, parts = (InferenceParams(1, 4), InferenceParams(1, 4)), []
    for rows in x.split([3, 1]):
        if counted_by == "pre_step":
            for params in caches:
                params.pre_step({"a": len(rows)})
        y = layer(rows, inference_params=caches[0])
        with pytest.raises(RuntimeError, match=r"once per step.*pre_step or reset.*its own InferenceParams"):
            layer(y, inference_params=caches[0])
        parts.append(layer(y, inference_params=caches[1]))
        if counted_by == "sequence_len_offset":
            for params in caches:
                params.sequence_len_offset += len(rows)
    torch.testing.assert_close(torch.cat(parts), whole)
    caches[0].reset()
    first = layer(x, inference_params=caches[0])
    caches[0].sequence_len_offset = 0  # once more from the start
    assert torch.equal(layer(x, inference_params=caches[0]), first)


def test_what_does_not_fit_is_refused() -> None:
    layer, x, params = layers("sbhd")[0], torch.randn(3, 2, 32), InferenceParams(2, 8)
    with pytest.raises(RuntimeError, match=r"do not support gradients: call the model under torch\.no_grad"):
        layer(x, inference_params=params)
    with torch.no_grad():
        with pytest.raises(TypeError, match=r"inference_params is dict; pass a lightning_fp8\.InferenceParams"):
            layer(x, inference_params={})
        with pytest.raises(ValueError, match="3 sequences are more than max_batch_size=2"):
            params.pre_step(dict.fromkeys(range(3), 1))
        with pytest.raises(ValueError, match="9 rows for sequence 'a', which has 0"):
            params.pre_step({"a": 9})
        params.pre_step({"a": 3})
        with pytest.raises(ValueError, match=r"do not match the last call of pre_step: .* \[3\]"):
            layer(x, inference_params=params)
        params.pre_step({"a": 0, "b": 3})
        padding = torch.zeros(2, 1, 1, 3, dtype=torch.bool)
        with pytest.raises(ValueError, match="attention_mask with .* is not supported with inference_params"):
            layer(x, padding, "padding_causal", inference_params=params)
    with pytest.raises(NotImplementedError, match="a paged cache"):
        InferenceParams(1, 8, is_paged=True, page_size=2, total_num_pages=4)
    with pytest.raises(ValueError, match="max_batch_size=0 must be a positive integer"):
        InferenceParams(0, 8)


@torch.no_grad()
def test_a_mask_of_any_form_over_the_cache() -> None:
    layer, x, params = layers("sbhd")[0], torch.randn(4, 1, 32), InferenceParams(1, 4)
    hidden = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 1], [1, 0, 0, 0]], dtype=torch.bool)[None, None]
    whole = layer(x, hidden, "arbitrary")
    first = layer(x[:3], hidden[..., :3, :3], "arbitrary", inference_params=params)
    params.sequence_len_offset = 3
    last = layer(x[3:], hidden[..., 3:, :], "arbitrary", inference_params=params)
    torch.testing.assert_close(torch.cat([first, last]), whole)


def test_a_cache_begun_in_inference_mode_goes_on_outside_it() -> None:
    model, x, params = layers("sbhd"), torch.randn(4, 2, 32), InferenceParams(2, 8)
    with torch.inference_mode():
        params.pre_step({"a": 3, "b": 3})
        forward(model, x[:3], inference_params=params)
        whole = forward(model, x[:, 1:])
    params.pre_step({"b": 1})
    with torch.no_grad():
        torch.testing.assert_close(forward(model, x[3:, 1:], inference_params=params), whole[3:])


def test_rows_are_counted_in_integers_of_at_least_0() -> None:
    """A negative offset would write to the end of the cache, and give keys that nobody has seen."""
    params = InferenceParams(2, 16)
    wrong = {
        "sequence_len_offset=-2 must be at least 0": lambda: setattr(params, "sequence_len_offset", -2),
        "sequence_len_offset='2' must be an integer": lambda: setattr(params, "sequence_len_offset", "2"),
        "rows of sequence 'a'=2.0 must be an integer": lambda: params.pre_step({"a": 2.0}),
        "rows of sequence 'a'=-1 must be at least 0": lambda: params.pre_step({"a": -1}),
        "pre_step takes a mapping of sequences": lambda: params.pre_step([2, 2]),
    }
    for message, action in wrong.items():
        with pytest.raises((TypeError, ValueError), match=message):
            action()
    params.sequence_len_offset = torch.tensor(3)
    params.sequence_len_offset += 2
    assert params.sequence_len_offset == 5
