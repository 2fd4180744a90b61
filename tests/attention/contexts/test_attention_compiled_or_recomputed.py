"""Other people's models with FP8 attention, compiled or recomputed: loss, gradients and amaxes as they are without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from lightning_fp8 import FP8FabricPrecision
from lightning_fp8.convert.attention_calls.owners import owner_of
from tests.attention.models.test_attention_zoo import padded
from tests.convert.test_zoo import animal, classified
from tests.convert.zoo import DECODER, ENCODER_DECODER, VISION, ZOO, Animal, hf
from tests.tiers import covering, thorough

SHORT = DECODER | {"num_hidden_layers": 1}
BERT = {name: value for name, value in SHORT.items() if name != "num_key_value_heads"}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WHISPER = ENCODER_DECODER | {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 16,
}


class Case(NamedTuple):
    """A model with one block of each kind.

    Attributes:
        attentions: how many modules attend.
        blocks, whole: torch.compile's back ends; without the latter test_attention_hf.py compiles the whole.
    """

    animal: Animal
    attentions: int
    recipe: str
    blocks: str = "eager"
    whole: str = ""


def short(name: str, model: str, config: str, **options: Any) -> Animal:
    return replace(ZOO[name], make=hf(model, config, **options))


LLAMA = short("llama", "LlamaForCausalLM", "LlamaConfig", **SHORT)
MISTRAL = padded(short("mistral", "MistralForCausalLM", "MistralConfig", sliding_window=4, **SHORT))
QWEN = short("qwen3", "Qwen3ForCausalLM", "Qwen3Config", head_dim=8, **SHORT)
VIT = short(
    "vit", "ViTForImageClassification", "ViTConfig", num_labels=8, **VISION | NO_DROPOUT | {"num_hidden_layers": 1}
)
CASES = {
    "llama": Case(LLAMA, 1, "delayed", blocks="aot_eager"),
    "mistral": Case(MISTRAL, 1, "tensorwise"),
    "qwen3": Case(QWEN, 1, "rowwise", whole="aot_eager"),
    "bert": Case(padded(short("bert", "BertForMaskedLM", "BertConfig", **BERT | NO_DROPOUT)), 1, "blockwise"),
    "vit": Case(VIT, 1, "mxfp8"),
    "whisper": Case(
        short("whisper", "WhisperForConditionalGeneration", "WhisperConfig", **WHISPER), 3, "delayed", whole="eager"
    ),
}


class Numbers(NamedTuple):
    """What one training step gives; of each attention, how often it ran in FP8 and in high precision."""

    loss: Tensor
    gradient: Tensor
    amaxes: list[Tensor]
    counts: list[tuple[int, int]]


def blocks(model: nn.Module) -> list[nn.Module]:
    return [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]


def recomputed(model: Any, reentrant: bool) -> None:
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return
    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    wrapper = partial(checkpoint_wrapper, checkpoint_impl=impl)
    inner = blocks(model)
    apply_activation_checkpointing(model, wrapper, lambda module: module in inner)


def compiled(modules: list[nn.Module], backend: str) -> None:
    for module in modules:
        module.compile(fullgraph=True, backend=backend)


def step(name: str, way: Callable[[nn.Module], None], fp8: bool = True) -> Numbers:
    """Forward and backward of a model that was made ``way``."""
    of = CASES[name]
    torch.manual_seed(0)
    model = of.animal.make().train()
    way(model)
    plugin = FP8FabricPrecision(  # norms that are not compiled would add in another order
        of.recipe,  # type: ignore[arg-type]
        attention=fp8,
        first_last_layers_bf16=False,
        fuse=False,
    )
    plugin.convert_module(model)
    with plugin.forward_context():
        output = model(**plugin.convert_input(of.animal.batch()))
        loss = output.loss if hasattr(output, "loss") else classified(output)
    plugin.backward(loss, model)
    owners = [owner for module in model.modules() if (owner := owner_of(module)) is not None]
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    amaxes = [history.amax.clone() for history in plugin.histories.values()]
    plugin.teardown()
    return Numbers(loss.detach(), gradient, amaxes, [(each.record.fp8, each.record.high_precision) for each in owners])


@cache
def plain(name: str, fp8: bool = True) -> Numbers:
    return step(name, lambda model: None, fp8)


def same(found: Numbers, right: Numbers) -> None:
    for one, other in zip((found.loss, found.gradient, *found.amaxes), (right.loss, right.gradient, *right.amaxes)):
        assert torch.equal(one, other)


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    animal(request.param)  # or skip
    return str(request.param)


def test_attention_is_counted_and_gradients_are_near(name: str) -> None:
    found, exact = plain(name), plain(name, fp8=False)
    assert found.counts == [(1, 0)] * CASES[name].attentions
    assert found.gradient.isfinite().all()
    assert not torch.equal(found.gradient, exact.gradient)
    assert (found.gradient - exact.gradient).norm() < 0.15 * exact.gradient.norm()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_blocks(name: str, reentrant: bool) -> None:
    found = step(name, partial(recomputed, reentrant=reentrant))
    same(found, plain(name))
    assert found.counts == [(1, 0)] * CASES[name].attentions


@thorough
@pytest.mark.usefixtures("nothing_traced")
@pytest.mark.parametrize("name", covering(CASES, lambda name: {"llama"} & {name}), indirect=True)
def test_compiled_blocks(name: str) -> None:
    found = step(name, lambda model: compiled(blocks(model), CASES[name].blocks))
    same(found, plain(name))
    assert found.counts == [(0, 0)] * CASES[name].attentions, "compiled code counts nothing"


@thorough
@pytest.mark.usefixtures("nothing_traced")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.whole], indirect=True)
def test_compiled_models(name: str) -> None:
    found = step(name, lambda model: compiled([model], CASES[name].whole))
    same(found, plain(name))
    assert found.counts == [(0, 0)] * CASES[name].attentions
