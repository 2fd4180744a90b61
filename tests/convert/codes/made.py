"""Codes and scales made by hand, in float64, and models that hold them."""

from __future__ import annotations

import importlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

BLOCKS = (128, 128)


def spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """The scale of each value of a weight, float64."""
    values = scale.float().double()
    if values.numel() == 1:
        return values.reshape(1, 1).expand(shape)
    if values.numel() == shape[0]:
        return values.reshape(-1, 1).expand(shape)
    return values.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]


def coded(weight: Tensor, kind: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The codes of ``weight [N, K]`` and their scales: ``"one"``, ``"rows"`` or ``"blocks"``, no powers of two."""
    values, (rows, columns) = weight.detach().double(), weight.shape
    if kind == "one":
        scale = values.abs().amax()
    elif kind == "rows":
        scale = values.abs().amax(1, keepdim=True)
    else:
        padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128, dtype=torch.float64)
        padded[:rows, :columns] = values.abs()
        scale = padded.reshape(padded.shape[0] // 128, 128, -1, 128).amax((1, 3))
    scale = (scale / 300).clamp_min(1e-30)
    if dtype == torch.float8_e8m0fnu:
        scale = scale.log2().ceil().exp2()
    scale = scale.float().to(dtype)
    return (values / spread(scale, weight.shape)).clamp(-448, 448).float().to(torch.float8_e4m3fn), scale


def hold_codes(
    layer: nn.Linear, kind: str = "blocks", dtype: torch.dtype = torch.float32, name: str = "weight_scale_inv"
) -> nn.Linear:
    """``layer`` with codes for its weight, and scales beside it."""
    codes, scale = coded(layer.weight, kind, dtype)
    layer.weight = nn.Parameter(codes, requires_grad=False)
    setattr(layer, name, nn.Parameter(scale, requires_grad=False))
    return layer


def values_of(layer: nn.Module, name: str = "weight_scale_inv") -> Tensor:
    """The weight of a layer in a state dict's terms, float64."""
    state = layer.state_dict()
    return state["weight"].double() * spread(state[name], state["weight"].shape)


def chain(kind: str = "blocks", features: int = 128, depth: int = 4) -> nn.Sequential:
    """BF16 layers; all but the first and the last one hold codes."""
    torch.manual_seed(0)
    layers = [nn.Linear(features, features, dtype=torch.bfloat16) for _ in range(depth)]
    return nn.Sequential(layers[0], *(hold_codes(each, kind) for each in layers[1:-1]), layers[-1])


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def same_bits(state: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two state dicts have the same keys, dtypes, shapes and bits."""
    return state.keys() == other.keys() and all(
        each.dtype == other[name].dtype
        and each.shape == other[name].shape
        and torch.equal(bits(each), bits(other[name]))
        for name, each in state.items()
    )


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: each.detach().clone() for name, each in state.items()}


def experts_with_codes(
    experts: int = 4, width: int = 256, hidden: int = 128, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    """transformers' FP8Experts ``[experts, 2 hidden or width, ...]``, whose scales are no powers of two."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        hidden_size=width, moe_intermediate_size=hidden, num_experts=experts, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    layer = _fp8_experts()(config, **{"block_size": BLOCKS, **options})
    generator = torch.Generator().manual_seed(0)
    for name in ("gate_up_proj", "down_proj"):
        weight = torch.randn(getattr(layer, name).shape, generator=generator) * width**-0.5
        pairs = zip(*(coded(each * 1.1**expert, "blocks", dtype) for expert, each in enumerate(weight)))
        for part, values in zip((name, f"{name}_scale_inv"), pairs):
            setattr(layer, part, nn.Parameter(torch.stack(values), requires_grad=False))
    return layer


@lru_cache
def _fp8_experts() -> Any:
    """The class, decorated as transformers does when it loads a checkpoint."""
    fine, moe = (importlib.import_module(f"transformers.integrations.{name}") for name in ("finegrained_fp8", "moe"))
    return moe.use_experts_implementation(fine.FP8Experts, experts_interface=fine.ALL_FP8_EXPERTS_FUNCTIONS)


def save_qwen(folder: Path, layers: int = 2) -> None:
    """A tiny Qwen3 in the format of the published FP8 checkpoints.

    Its blocks are whole: transformers 5.24 takes parts of blocks for smaller blocks when it dequantizes.
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    _save_codes(transformers.Qwen3ForCausalLM, config, folder, ["lm_head"])


def save_moe(folder: Path, layers: int = 2) -> None:
    """A tiny Qwen3-MoE in the format of the published FP8 checkpoints, in which experts are matrices of their own."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=256, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=64, num_experts=4,
        num_experts_per_tok=2, tie_word_embeddings=False,
    )  # fmt: skip
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(layers)]
    _save_codes(transformers.Qwen3MoeForCausalLM, config, folder, ["lm_head", *routers])


def _save_codes(cls: Any, config: Any, folder: Path, in_bf16: list[str]) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    cls(config).to(torch.bfloat16).save_pretrained(folder)
    state: dict[str, Tensor] = {}
    for name, value in safetensors.load_file(folder / "model.safetensors").items():
        if name.endswith("proj.weight"):
            state[name], state[f"{name}_scale_inv"] = coded(value, "blocks")
        else:
            state[name] = value
    safetensors.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    quantization = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [*BLOCKS],
        "modules_to_not_convert": in_bf16,
    }  # fmt: skip
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))


def load_qwen(folder: Path, monkeypatch: pytest.MonkeyPatch, dequantize: bool = False) -> Any:
    """The saved model with transformers' FP8 layers, which it otherwise loads only where there is a GPU."""
    transformers = pytest.importorskip("transformers")
    quantizers: Any = importlib.import_module("transformers.quantizers.quantizer_finegrained_fp8")
    monkeypatch.setattr(quantizers.FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    more = {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)} if dequantize else {}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **more)
