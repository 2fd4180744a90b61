"""Mistakes in calls: each error or warning has the wrong value and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fp8 import (
    DelayedScaling,
    FP8Monitor,
    FP8State,
    conversion_summary,
    convert_module,
    fp8_autocast,
    fp8_state_dict,
    load_fp8_state_dict,
)


def mlp(layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)])


MISTAKES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "recipe by position": (
        lambda: convert_module(mlp(), "delayed"),  # type: ignore[misc]
        ["convert_module(model) got 'delayed' by position", "by name: recipe, "],
    ),
    "two models": (lambda: convert_module(mlp(), mlp()), ["convert_module(model) got Sequential("]),  # type: ignore[misc, arg-type]
    "a folder as model": (
        lambda: convert_module("Qwen/Qwen3-8B-FP8"),  # type: ignore[arg-type]
        ["a torch.nn.Module, not str 'Qwen/Qwen3-8B-FP8'; load the model first"],
    ),
    "an autocast's second argument": (
        lambda: fp8_autocast(True, "delayed"),  # type: ignore[arg-type]
        ["calibrating='delayed', the second argument", "a recipe is fp8_autocast(fp8_recipe=...)"],
    ),
    "a table before the conversion": (lambda: conversion_summary(mlp()), ["call convert_module(model) first"]),
    "a table of a wrapper": (
        lambda: conversion_summary(nn.ModuleDict({"inner": convert_module(mlp())})),
        ["this ModuleDict is not a model that convert_module converted; pass its inner, which was"],
    ),
    "a state of an optimizer": (
        lambda: FP8State(torch.optim.SGD(mlp().parameters())),  # type: ignore[arg-type]
        ["FP8State takes a torch.nn.Module, not SGD"],
    ),
}


@pytest.mark.parametrize(("call", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_with_its_way_out(call: Callable[[], Any], said: list[str]) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    assert not [each for each in said if each not in str(raised.value)], str(raised.value)


def test_arguments_that_go_by_position_still_do() -> None:
    assert DelayedScaling(1).margin == 1
    assert FP8Monitor(7).every_n_steps == 7


def test_a_state_of_a_larger_model_names_what_is_ignored() -> None:
    large, small = convert_module(mlp(9)), convert_module(mlp(4))
    ignored = sorted({*fp8_state_dict(large)["names"]} - {*fp8_state_dict(small)["names"]})
    said = f"the model lacks {len(ignored)} tensors of the FP8 state, {ignored[0]} for example"
    with pytest.warns(UserWarning, match=re.escape(said)):
        assert load_fp8_state_dict(small, fp8_state_dict(large)) == []


def test_a_quantized_model_is_told_to_load_it_unquantized() -> None:
    class Linear4bit(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input

    model = nn.Sequential(*[Linear4bit(64, 64) for _ in range(4)])
    with pytest.warns(UserWarning, match="Linear4bit is a subclass.*; if the model was quantized, load it unquantized"):
        convert_module(model)


def test_scales_of_codes_are_no_rows_of_the_table() -> None:
    model = mlp().requires_grad_(False)
    for layer in model:
        assert isinstance(layer, nn.Linear)
        layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
        layer.weight_scale = nn.Parameter(torch.ones(64, 1), requires_grad=False)  # one for each row
    rows = conversion_summary(convert_module(model, recipe="rowwise")).layers
    assert [row.name for row in rows] == ["0", "1", "2", "3"]
