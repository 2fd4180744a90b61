"""What a block reads and writes of activations, counted op by op, against a converted Llama block's.

In eager mode each op of torch is a kernel that reads its inputs from global memory and writes its results there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from lightning_fp8 import TransformerLayer, convert_module, fp8_autocast
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.transformer import RotaryPositionEmbedding

BATCH, TIME = 2, 37
"""A prime number of positions, which tells activations, whose sizes it divides, from weights."""
HIDDEN, FFN, HEADS, GROUPS = 256, 704, 8, 2

MOVES_NOTHING = ("aten::detach", "aten::_unsafe_view", "aten::empty_like", "aten::new_empty_strided")


class Traffic(TorchDispatchMode):
    """Counts elements of activations that ops read and write; a view moves none."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if not func.is_view and func.name() not in MOVES_NOTHING:
            read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            written = [each for each in tree_leaves(results) if isinstance(each, Tensor)]
            self.elements += sum(each.numel() for each in (*read, *written) if each.numel() % TIME == 0)
        return results


def traffic(block: Callable[[Tensor], Tensor], recipe: str) -> int:
    """Elements that a forward and a backward pass of ``block`` move; the first step, which prepares, is not counted."""
    x = torch.randn(BATCH, TIME, HIDDEN, dtype=torch.bfloat16).requires_grad_()

    def step() -> None:
        with fp8_autocast(fp8_recipe=recipe):
            y = block(x)
        y.backward(x.detach())

    step()
    with Traffic() as counted:
        step()
    return counted.elements


def llama_block(fuse: bool = False) -> Callable[[Tensor], Tensor]:
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_attention_heads=HEADS, num_key_value_heads=GROUPS
    )
    config._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(config, 0).to(torch.bfloat16)
    convert_module(layer, first_last_layers_bf16=False, fuse=fuse)
    nothing = torch.zeros(1, dtype=torch.bfloat16)
    cos_sin = LlamaRotaryEmbedding(config)(nothing, torch.arange(TIME)[None])

    def call(x: Tensor) -> Tensor:
        y = layer(x, position_embeddings=cos_sin, attention_mask=None)
        return y[0] if isinstance(y, tuple) else y  # up to transformers 4.53

    return call


def block_of_ours() -> Callable[[Tensor], Tensor]:
    layer = TransformerLayer(
        HIDDEN,
        FFN,
        HEADS,
        num_gqa_groups=GROUPS,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        attn_input_format="bshd",
    )
    convert_module(layer, first_last_layers_bf16=False)
    positions = RotaryPositionEmbedding(HIDDEN // HEADS)(TIME)
    return lambda x: layer(x, rotary_pos_emb=positions)


@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_modules_move_six_tenths_of_a_converted_block(recipe: str) -> None:
    """Scales of rows count as elements; with one scale for a tensor its second copy is a view on the CPU."""
    assert traffic(block_of_ours(), recipe) <= 0.6 * traffic(llama_block(), recipe)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_a_fused_block_of_llama_writes_no_activation_between_gate_and_down(recipe: str) -> None:
    """SiLU, its product with up and down's cast read 4 F elements of each row, and write 2 F; backward they and the
    casts for gate and up read 8 F and write 3 F. The fused casts read 2 F, and backward 5 F. Norms save more.
    """
    assert traffic(llama_block(), recipe) - traffic(llama_block(fuse=True), recipe) >= 10 * BATCH * TIME * FFN
