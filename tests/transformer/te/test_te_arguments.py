"""Every argument that Transformer Engine documents is accepted, or refused with the reason that the table states."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import lightning_fp8
from lightning_fp8.te.arguments import _UNSUPPORTED, _VALUES, ParallelArguments
from tests.small import assert_raises
from tests.transformer.te.te_arguments import CONSTRUCTORS, FORWARDS, FUNCTIONS, Refused

POSITIONAL: dict[str, tuple[int, ...]] = {
    "LayerNorm": (32,),
    "RMSNorm": (32,),
    "LayerNormMLP": (32, 48),
    "MultiheadAttention": (32, 4),
    "TransformerLayer": (32, 48, 4),
    "DotProductAttention": (4, 8),
}


def made(cls: str, /, **options: Any) -> torch.nn.Module:
    return getattr(lightning_fp8, cls)(*POSITIONAL.get(cls, (32, 32)), **options)


def check(call: Callable[..., object], arguments: Mapping[str, Any]) -> None:
    """Each value of each argument is taken, or refused with its reason."""
    for argument, values in arguments.items():
        for value in values:
            if isinstance(value, Refused):
                assert_raises(partial(call, **{argument: value.value}), value.error, value.reason)
            else:
                call(**{argument: value})


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_arguments_of_constructors(name: str) -> None:
    check(partial(made, name), CONSTRUCTORS[name])


@pytest.mark.parametrize("name", FORWARDS)
@torch.no_grad()
def test_arguments_of_forwards(name: str) -> None:
    inputs = [torch.randn(6, 2, 4, 8)] * 3 if name == "DotProductAttention" else [torch.randn(6, 2, 32)]
    check(partial(made(name).eval(), *inputs), FORWARDS[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_of_functions(name: str) -> None:
    function = getattr(lightning_fp8, name)
    check(partial(function, function=dict) if name == "checkpoint" else function, FUNCTIONS[name])


DOCUMENTED = json.loads((Path(__file__).parent / "te_documented.json").read_text())
"""What Transformer Engine 1.x documents: arguments in order, and the defaults that it states."""
INPUTS = {"inp", "hidden_states", "query_layer", "key_layer", "value_layer"}
OTHER_DEFAULTS = {
    "params_dtype": None,  # torch's default dtype, asked for when the layer is made
    "enabled": True,  # who writes ``with fp8_autocast():`` or ``onnx_export():`` means it, as in the newest versions
    "num_gqa_groups": None,
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_each_documented_name_is_tried_above_and_has_the_documented_default(name: str) -> None:
    tables = {"constructor": CONSTRUCTORS, "forward": FORWARDS, "call": FUNCTIONS}
    documented = {part: each for part, each in DOCUMENTED[name].items() if part in tables}
    assert documented
    for part, arguments in documented.items():
        function = getattr(lightning_fp8, name)
        if part == "forward":
            function = function.forward
        parameters = inspect.signature(function).parameters
        positional = [each for each in arguments["without_default"] if each not in tables[part][name]]
        for argument in positional:  # each call of the tests passes them
            assert part == "constructor" or argument in INPUTS
            assert argument in parameters
        for argument, default in arguments["defaults"].items():
            assert argument in tables[part][name]
            if argument in parameters:
                assert parameters[argument].default == OTHER_DEFAULTS.get(argument, default), argument
    for method in DOCUMENTED[name].get("methods", []):
        layer = made(name)
        getattr(layer, method)(None)
        assert_raises(partial(getattr(layer, method), object()), TypeError, "must be a process group")


def test_the_tables_hold_the_documented_names_and_defaults() -> None:
    signatures = [inspect.signature(getattr(lightning_fp8, name)).parameters for name in CONSTRUCTORS]
    taken = {name for signature in signatures for name in signature} | ParallelArguments.__annotations__.keys()
    assert _VALUES.keys() | _UNSUPPORTED.keys() <= taken
    assert not _VALUES.keys() & _UNSUPPORTED.keys()
    for argument, (default, instead) in _UNSUPPORTED.items():
        assert any(way in instead for way in ("leave it", "split the batch", "compute them")), instead
        for signature in signatures:
            if argument in signature and (default, argument) != ({}, "activation_params") and argument != "num_splits":
                assert signature[argument].default == default, argument


def test_names_of_our_signatures_are_no_arguments() -> None:
    """``parallel`` takes the others; values without a name beyond the positional ones are refused as Python does."""
    for name in ("Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer"):
        assert_raises(partial(made, name, parallel={}), TypeError, f"{name} got an unexpected .* argument 'parallel'")
    assert_raises(lambda: lightning_fp8.Linear(32, 32, True, "x"), TypeError, "takes from 3 to 4 positional arguments")
    assert_raises(lambda: lightning_fp8.Linear(32), TypeError, "missing 1 required positional argument")


def test_an_input_has_transformer_engines_name_and_torchs() -> None:
    layer, x = lightning_fp8.Linear(32, 32), torch.randn(2, 32)
    assert torch.equal(layer(inp=x), layer(x))
    assert torch.equal(layer(input=x), layer(x))
    assert_raises(partial(layer, inp=x, input=x), TypeError, "takes one input")
    assert_raises(layer, TypeError, "takes a tensor, not NoneType")


ORDER = {
    "MultiheadAttention": "hidden_size num_attention_heads kv_channels attention_dropout layernorm_epsilon init_method "
    "output_layer_init_method layer_number attn_mask_type window_size bottom_right_diagonal",
    "TransformerLayer": "hidden_size ffn_hidden_size num_attention_heads num_gqa_groups layernorm_epsilon "
    "hidden_dropout attention_dropout init_method output_layer_init_method layer_number kv_channels "
    "self_attn_mask_type window_size bottom_right_diagonal enc_dec_attn_mask_type enc_dec_bottom_right_diagonal "
    "enc_dec_window_size",
    "MultiheadAttention.forward": "hidden_states attention_mask encoder_output attn_mask_type window_size "
    "bottom_right_diagonal",
    "TransformerLayer.forward": "hidden_states attention_mask self_attn_mask_type window_size bottom_right_diagonal "
    "encoder_output enc_dec_attn_mask enc_dec_attn_mask_type enc_dec_window_size enc_dec_bottom_right_diagonal",
}


@pytest.mark.parametrize("name", ORDER)
def test_positional_arguments_are_in_transformer_engines_order(name: str) -> None:
    cls, _, method = name.partition(".")
    parameters = inspect.signature(getattr(getattr(lightning_fp8, cls), method or "__init__")).parameters.values()
    positional = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert " ".join(positional[1:]) == ORDER[name]


PADDING = torch.arange(6).expand(2, 1, 1, 6) > torch.tensor([3, 5]).reshape(2, 1, 1, 1)


@pytest.mark.parametrize(
    ("name", "options", "call", "way_out"),
    [
        ("MultiheadAttention", {}, {"attention_mask": PADDING}, "'padding_causal', or 'arbitrary'"),
        ("MultiheadAttention", {"attn_mask_type": "no_mask"}, {"attention_mask": PADDING}, "'padding', or 'arbitrary'"),
        ("TransformerLayer", {}, {"attention_mask": PADDING}, "'padding_causal', or 'arbitrary'"),
        ("TransformerLayer", {}, {"enc_dec_attn_mask": PADDING}, "layer_type='decoder'"),
        ("TransformerLayer", {}, {"enc_dec_attn_mask_type": "padding"}, "enc_dec_attn_mask_type has no effect"),
        ("TransformerLayer", {}, {"enc_dec_window_size": (2, 2)}, "enc_dec_window_size has no effect"),
    ],
)
@torch.no_grad()
def test_a_mask_without_effect_is_warned_of_once(
    name: str, options: dict[str, Any], call: dict[str, Any], way_out: str
) -> None:
    layers, x = [made(name, **options).eval() for _ in range(2)], torch.randn(6, 2, 32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for layer in (*layers, *layers):
            assert torch.equal(layer(x, **call), layer(x))
    (warning,) = caught
    assert re.search("without effect|has no effect", str(warning.message))
    assert way_out in str(warning.message)


def test_what_does_not_go_together() -> None:
    for options, message in (
        ({"parallel_attention_mlp": True, "layer_type": "decoder"}, "needs layer_type='encoder'"),
        ({"parallel_attention_mlp": True, "output_layernorm": True}, "nor output_layernorm"),
        ({"num_gqa_groups": 3}, "num_gqa_groups=3 does not divide num_attention_heads=4"),
        ({"hidden_dropout": 1.5}, "hidden_dropout=1.5 must be a finite number"),
        ({"qk_norm_type": "BatchNorm"}, "qk_norm_type='BatchNorm' is unknown"),
        ({"normalization": "BatchNorm"}, "normalization='BatchNorm' is unknown"),
    ):
        assert_raises(lambda: made("TransformerLayer", **options), ValueError, message)  # noqa: B023
    message = "num_attention_heads=5 does not divide hidden_size=32; pass kv_channels"
    assert_raises(lambda: lightning_fp8.MultiheadAttention(32, 5), ValueError, message)
    message = "layer_type='decoder' needs encoder_output"
    assert_raises(lambda: made("TransformerLayer", layer_type="decoder")(torch.randn(6, 2, 32)), ValueError, message)
    message = "rotary_pos_emb has 4 positions, fewer than the 6 of the sequence"
    few = lightning_fp8.RotaryPositionEmbedding(8)(4)
    assert_raises(lambda: made("TransformerLayer")(torch.randn(6, 2, 32), rotary_pos_emb=few), ValueError, message)
    message = r"rotary_pos_emb has shape \[6, 8\]; it must be"
    flat = torch.zeros(6, 8)
    assert_raises(lambda: made("TransformerLayer")(torch.randn(6, 2, 32), rotary_pos_emb=flat), ValueError, message)


@torch.no_grad()
def test_lengths_reach_the_core_attention() -> None:
    """Those of a decoder's own attention are its queries'; a cache has its own."""
    given: list[tuple[int | None, int | None]] = []
    core = lightning_fp8.DotProductAttention.forward

    def noted(self: torch.nn.Module, *args: Any, **call: Any) -> torch.Tensor:
        given.append((call["max_seqlen_q"], call["max_seqlen_kv"]))
        return core(self, *args, **call)

    starts = torch.tensor([0, 4, 6], dtype=torch.int32)
    lengths: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_kv": torch.tensor([0, 5, 8], dtype=torch.int32)}
    lengths |= {"max_seqlen_q": 4, "max_seqlen_kv": 5}
    layer = made("TransformerLayer", layer_type="decoder", attn_input_format="thd", enc_dec_attn_mask_type="padding")
    with patch.object(lightning_fp8.DotProductAttention, "forward", noted):
        layer.eval()(torch.randn(6, 32), encoder_output=torch.randn(8, 32), **lengths)
        short = lengths | {"max_seqlen_q": 2}
        message = "max_seqlen_q=2, and cu_seqlens_q has a sequence of 4 rows; pass 4, or None"
        assert_raises(
            lambda: layer(torch.randn(6, 32), encoder_output=torch.randn(8, 32), **short), ValueError, message
        )
        cached, params = made("MultiheadAttention").eval(), lightning_fp8.InferenceParams(2, 6)
        params.pre_step({0: 3, 1: 3})
        cached(torch.randn(3, 2, 32), inference_params=params, max_seqlen_q=1, max_seqlen_kv=1)
    assert given == [(4, 4), (4, 5), (2, 2), (None, None)]
