"""transformers' masks as bands with padding, and models that call our attention, against transformers' own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import FP8FabricPrecision, Linear
from lightning_fp8.attention import sequence_tables
from lightning_fp8.attention.function import fp8_attention
from lightning_fp8.attention.ops import Band, attention_tables
from lightning_fp8.convert.attention_calls import sdpa
from lightning_fp8.convert.attention_calls.owners import owner_of
from lightning_fp8.convert.first_step import watched
from tests.convert.zoo import DECODER, ENCODER_DECODER, VOCABULARY, hf, image

masking = pytest.importorskip("transformers.masking_utils")
if "q_length" not in masking.sdpa_mask.__code__.co_varnames:
    pytest.skip("this transformers does not say queries' number to mask functions", allow_module_level=True)

from lightning_fp8.convert.attention_calls import hf as ours  # noqa: E402
from lightning_fp8.convert.attention_calls.bands import (  # noqa: E402
    Padded,
    band_of,
    carried,
    dense,
    from_carried,
    is_carried,
)
from tests.tiers import covering, thorough  # noqa: E402

LENGTH = 12


@pytest.mark.parametrize(
    ("function", "band"),
    [
        (masking.causal_mask_function, Band(right=0)),
        (masking.bidirectional_mask_function, Band()),
        (masking.sliding_window_causal_mask_function(5), Band(4, 0)),
        (masking.sliding_window_bidirectional_mask_function(3), Band(3, 3)),
        (masking.sliding_window_causal_mask_function(1), Band(0, 0)),
    ],
)
def test_bands_are_those_of_transformers(function: Callable[..., Any], band: Band) -> None:
    assert band_of(function) == band
    keys = torch.arange(LENGTH) < torch.tensor([[LENGTH], [7]])
    padded = from_carried(carried(Padded(keys, band)))
    assert padded.band == band
    options = {"attention_mask": keys, "allow_is_causal_skip": False}
    exact = masking.sdpa_mask(2, LENGTH, LENGTH, mask_function=function, **options)
    assert torch.equal(dense(padded, LENGTH), exact)


def test_what_is_no_band_is_not_taken_for_one() -> None:
    causal = masking.causal_mask_function
    ids = torch.tensor([[0, 0, 1, 1]])
    for function in (
        masking.packed_sequence_mask_function(ids),
        masking.and_masks(causal, masking.packed_sequence_mask_function(ids)),
        masking.or_masks(causal, masking.blockwise_overlay(ids)),
        masking.chunked_causal_mask_function(2, torch.zeros(1, dtype=torch.long)),
        lambda b, h, q, kv: kv <= 2 * q,
        lambda b, h, q, kv: (kv <= q) | (kv == 0),
        lambda b, h, q, kv: kv > q,
        lambda b, h, q, kv: kv <= q and kv >= q - 3,
        lambda b, h, q, kv: q - 3 <= kv <= q,
    ):
        assert band_of(function) is None


def masks(padding: str) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if padding == "right":
        mask[1, 8:] = 0
    if padding == "left":
        mask[1, :4] = 0
    return {"input_ids": ids, **({} if padding == "none" else {"attention_mask": mask})}


BERT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"use_cache": False, **DECODER}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"use_cache": False, "sliding_window": 4, **DECODER}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 8, **DECODER}),
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
    "bart": ("BartForConditionalGeneration", "BartConfig", {"max_position_embeddings": 16, **ENCODER_DECODER}),
}


def made(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model, config, own = MODELS[name]
    return hf(model, config, **{**own, **options})().train()


def attached(model: nn.Module, **options: Any) -> FP8FabricPrecision:
    plugin = FP8FabricPrecision("tensorwise", attention=True, weights_dtype=torch.float32, **options)
    plugin.convert_module(model)
    for module in model.modules():
        if isinstance(module, Linear):
            module.fp8 = False  # attention alone
    watched(model).stop()  # who would say later what a warning says at once
    return plugin


def ran(model: nn.Module) -> dict[str, tuple[int, int]]:
    found = {name: owner_of(module) for name, module in model.named_modules()}
    return {name: (own.record.fp8, own.record.high_precision) for name, own in found.items() if own is not None}


def counted(batch: dict[str, Tensor]) -> Tensor:
    """Rows that are no padding."""
    return batch.get("attention_mask", torch.ones(2, LENGTH)).bool()


@pytest.mark.parametrize("padding", ["none", "full", "right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_models_against_their_own_attention(name: str, padding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit outside FP8 contexts; near inside, unless padding comes first, which stays in high precision."""
    monkeypatch.setattr("lightning_fp8.plugin.fabric.rank_zero_warn", lambda text: None)
    batch, model = masks(padding), made(name)
    twin = copy.deepcopy(model)
    exact = twin(**batch).logits
    plugin = attached(model, first_last_layers_bf16=False)
    assert torch.equal(model(**batch).logits, exact)

    if padding == "left":
        with pytest.warns(UserWarning, match="padding at the start"), plugin.forward_context():
            near = model(**batch).logits
    else:
        with plugin.forward_context():
            near = model(**batch).logits
    near, exact = near[counted(batch)], exact[counted(batch)]
    of_all = ran(model)
    in_fp8 = {name for name, (fp8, _) in of_all.items() if fp8}
    if padding != "left":
        assert in_fp8 == of_all.keys()
        assert not torch.equal(near, exact)
    assert (near - exact).norm() < 0.05 * exact.norm()
    near.square().mean().backward()
    exact.square().mean().backward()
    ours, right = (torch.cat([p.grad.flatten() for p in of.parameters() if p.grad is not None]) for of in (model, twin))
    assert (ours - right).norm() < 0.05 * right.norm()
    plugin.teardown()
    assert model.config._attn_implementation == "sdpa"


def test_layers_share_what_a_card_reads_of_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    made_of: list[Any] = []
    monkeypatch.setattr(sequence_tables, "on_card", lambda device: True)
    monkeypatch.setattr(
        "lightning_fp8.attention.function.attention_tables",
        lambda *given: (made_of.append(given), attention_tables(*given))[1],
    )
    model = made("llama")
    plugin = attached(model, first_last_layers_bf16=False)
    with plugin.forward_context():
        model(**masks("right"), use_cache=False).logits.sum().backward()
    assert list(ran(model).values()) == [(1, 0)] * 3
    assert len(made_of) == 1


def test_cross_attention_of_other_lengths() -> None:
    batch = {**masks("right"), "decoder_input_ids": masks("none")["input_ids"][:, :5]}
    model = made("bart")
    exact = copy.deepcopy(model)(**batch).logits
    plugin = attached(model, first_last_layers_bf16=False)
    assert torch.equal(model(**batch).logits, exact)
    with plugin.forward_context():
        near = model(**batch).logits
    assert all(fp8 == 1 for fp8, _ in ran(model).values())
    assert len(ran(model)) == 9
    assert (near - exact).norm() < 0.05 * exact.norm()


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, fullgraph=True, backend="aot_eager")


@pytest.mark.usefixtures("nothing_traced")
@pytest.mark.parametrize(
    ("name", "padding"),
    covering(
        [
            ("llama", "none"),
            ("llama", "right"),
            ("mistral", "none"),
            ("mistral", "right"),
            ("bert", "none"),
            ("bert", "full"),
            ("bart", "none"),
        ],
        lambda row: {row} & {("mistral", "right")},
    ),
)
def test_whole_models_compile(name: str, padding: str) -> None:
    batch, model = masks(padding), made(name, num_hidden_layers=1, decoder_layers=1, use_cache=False)
    plugin = attached(model, first_last_layers_bf16=False)
    with plugin.forward_context():
        assert torch.equal(compiled(model)(**batch).logits[counted(batch)], model(**batch).logits[counted(batch)])
    assert set(ran(model).values()) == {(1, 0)}, "the eager run"
    assert len(ran(model)) == (3 if name == "bart" else 1)


@thorough
@pytest.mark.usefixtures("nothing_traced")
def test_compiled_models_refuse_what_they_cannot_see() -> None:
    model = made("mistral", num_hidden_layers=1)
    plugin = attached(model, first_last_layers_bf16=False)
    packed = {**masks("none"), "position_ids": torch.arange(LENGTH)[None] % 7}
    for batch, said in ((packed, "packed sequences"), (masks("left"), "padding at the end")):
        with plugin.forward_context(), pytest.raises(RuntimeError, match=said):
            compiled(model)(**batch)
    with plugin.forward_context(), pytest.warns(UserWarning, match="packed sequences"):
        model(**packed)


def test_generation_with_a_cache() -> None:
    model = made("llama").eval()
    ids = masks("none")["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    exact = copy.deepcopy(model).generate(ids, **options)
    plugin = attached(model)
    assert torch.equal(model.generate(ids, **options), exact)
    with plugin.forward_context(), pytest.warns(UserWarning, match="keys and values come from a cache"):
        model.generate(ids, **options)


@pytest.mark.parametrize("switched", [True, False])
def test_blocks_in_high_precision_stay_there(switched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the model is told to call torch's function, or a module that nobody found calls ours."""
    model = made("llama")
    ran_in_fp8: list[torch.Size] = []

    def noted(q: Tensor, *args: Any, **options: Any) -> Tensor:
        ran_in_fp8.append(q.shape)
        return fp8_attention(q, *args, **options)

    plugin = attached(model)
    for module in (sdpa, ours):
        monkeypatch.setattr(module, "fp8_attention", noted)
    if switched:
        model.set_attn_implementation("sdpa")
    else:
        monkeypatch.setattr(ours, "owner_of", lambda module: None)
    with plugin.forward_context():
        model(**masks("none"))
    assert len(ran_in_fp8) == 1
    assert len(ran(model)) == 3


def test_what_stays_in_high_precision() -> None:
    model = hf("LlamaForCausalLM", "LlamaConfig", **{**DECODER, "attention_dropout": 0.1})().train()
    plugin = attached(model)
    with plugin.forward_context(), pytest.warns(UserWarning, match=r"its dropout is 0\.1"):
        model(**masks("none"))
    model = made("llama")
    model.set_attn_implementation("eager")
    plugin = attached(model)
    assert "attn_implementation='eager'" in str(plugin.summary)
    assert model.config._attn_implementation == "eager"


@thorough
@pytest.mark.usefixtures("nothing_traced")
def test_vit_has_no_mask() -> None:
    options = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = hf("ViTForImageClassification", "ViTConfig", image_size=32, patch_size=8, **options)().train()
    exact = copy.deepcopy(model)(**image()()).logits
    plugin = attached(model)
    with plugin.forward_context():
        near = model(**image()()).logits
        assert torch.equal(compiled(model)(**image()()).logits, near)
    assert sorted(ran(model).values()) == [(0, 1), (0, 1), (1, 0)]
    assert (near - exact).norm() < 0.05 * exact.norm()


def test_a_mask_has_no_other_form() -> None:
    assert not is_carried(None)
    assert not is_carried(torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool))
    keys = torch.arange(LENGTH) < torch.tensor([[LENGTH], [7]])
    assert is_carried(ours.mask(2, LENGTH, LENGTH, attention_mask=keys))
    assert ours.mask(2, LENGTH, LENGTH, attention_mask=torch.ones(2, LENGTH, dtype=torch.bool)) is None
    assert ours.mask(2, LENGTH, LENGTH) is None
    assert ours.mask(2, 1, LENGTH, q_offset=LENGTH - 1, attention_mask=keys).shape == (2, 1, 1, LENGTH)
