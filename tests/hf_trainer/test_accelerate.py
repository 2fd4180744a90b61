"""FP8 in loops of accelerate, on one process and on two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="loops of accelerate")

from accelerate import Accelerator

from lightning_fp8 import FP8State, convert_module, fp8_autocast
from tests.distributed.launch import run_on_two_ranks
from tests.hf_trainer.small import Tokens, assert_same_scales, assert_same_weights, llama
from tests.tiers import thorough


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("blockwise", marks=thorough)])
def test_a_loop_equals_the_one_by_hand_and_resumes(recipe: str, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = convert_module(llama(), recipe=recipe)
    accelerator.register_for_checkpointing(FP8State(model))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    prepared, stepper, loader = accelerator.prepare(model, optimizer, DataLoader(Tokens(), batch_size=4))

    def train(first: int) -> None:
        prepared.train()
        for index, batch in enumerate(loader):
            if index == 4 and not first:
                accelerator.save_state(str(tmp_path))
            if index >= first:
                with accelerator.accumulate(prepared):
                    accelerator.backward(prepared(**batch).loss)
                    stepper.step()
                    stepper.zero_grad()

    train(0)
    expected, tokens = convert_module(llama()).train(), Tokens().tokens
    optimizer = torch.optim.AdamW(expected.parameters(), 1e-2)
    for index in range(8):
        batch = tokens[4 * index :][:4]
        with fp8_autocast(fp8_recipe=recipe), torch.autocast("cpu", torch.bfloat16):
            loss = expected(input_ids=batch, labels=batch).loss
        (loss / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, expected)
    if recipe == "delayed":
        assert_same_scales(model, expected)
    accelerator.load_state(str(tmp_path))
    train(4)
    assert_same_weights(model, expected)
    if recipe == "delayed":
        assert_same_scales(model, expected)


def test_what_is_missing_in_a_state_is_told() -> None:
    model = convert_module(llama(), recipe="delayed")
    state = FP8State(model).state_dict()
    kept = [index for index, name in enumerate(state["names"]) if "up_proj" not in name]
    part = {"names": [state["names"][index] for index in kept]}
    part |= {name: state[name][..., kept] for name in ("scale", "amax_history", "seen", "counts")}
    with pytest.warns(UserWarning, match=r"lacks 3 tensors, model.layers.1.mlp.up_proj.\w+ for example"):
        FP8State(model).load_state_dict({**state, **part})
    with pytest.raises(TypeError, match="FP8State"):
        FP8State(None)  # type: ignore[arg-type]


@thorough
def test_two_ranks(tmp_path: Path) -> None:
    """Of accelerate and of a Trainer: ranks are alike, equal a loop by hand, and resume to the bit."""
    first, second = run_on_two_ranks("hf_accelerate", str(tmp_path), folder=tmp_path)
    assert first == second
    assert first["type"] == "DistributedDataParallel"
    assert first["updates"] == 4
    assert first["accelerate"] == first["accelerate resumed"] == first["by hand"]
    assert first["trainer"] == first["trainer resumed"]
