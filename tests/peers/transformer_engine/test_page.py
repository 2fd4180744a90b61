"""Each row of ``docs/transformer_engine_calls.md``: what is accepted runs, and what is refused raises the sentence."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_fp8
from lightning_fp8 import fp8_autocast
from lightning_fp8.transformer_engine import answers
from lightning_fp8.transformer_engine import pytorch as te
from tests.peers.transformer_engine.page import core_sentences, rows


def run_under(recipe: Any, module: nn.Module) -> Tensor:
    """The module's output in FP8."""
    with fp8_autocast(fp8_recipe=recipe):
        output: Tensor = module(torch.randn(8, 2, 32))
    return output


def evaluated(expression: str) -> Any:
    """What the call of a row gives."""
    ours = {name: getattr(lightning_fp8, name) for name in lightning_fp8.__all__}
    q, starts = torch.randn(8, 2, 4, 8), torch.tensor([0, 8, 16])
    names = {
        **ours,
        "te": te,
        "torch": torch,
        "run_under": run_under,
        "x": torch.randn(8, 2, 32),
        "q": q,
        "starts": starts,
    }
    return eval(expression.strip("`"), names)


@pytest.mark.parametrize("call", [call for call, _ in rows("Accepted")])
def test_what_is_accepted_runs(call: str) -> None:
    output = evaluated(call)
    output = output[0] if isinstance(output, tuple) else output
    assert output.isfinite().all()
    if output.requires_grad:
        output.sum().backward()


@pytest.mark.parametrize(("call", "sentence"), rows("Refused"))
def test_what_is_refused_raises_the_sentence(call: str, sentence: str) -> None:
    errors = (NotImplementedError, ValueError, RuntimeError, AttributeError)
    with pytest.raises(errors, match=re.escape(sentence)):
        evaluated(call)


def test_sentences_of_internals_are_those_of_the_imports() -> None:
    kinds = core_sentences()
    assert kinds == {
        "state": answers.STATE["FP8GlobalStateManager"],
        "quantizers": answers.PYTORCH["Float8Quantizer"],
        "tensors": answers.PYTORCH["QuantizedTensor"],
        "operations": answers.MODULES["ops"],
        "functions": answers.MODULES["cpp_extensions"],
        "internal": answers.MODULES["utils"],
    }
