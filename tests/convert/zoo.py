"""Tiny configurations of other people's models, and which layers run in FP8. Data; test_zoo.py trains them."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

VOCABULARY = 96
WIDTH, HIDDEN, LAYERS, HEADS = 32, 64, 3, 4


@dataclass(frozen=True)
class Animal:
    """A model of the zoo.

    Attributes:
        make: the model, with random weights.
        batch: its keyword arguments, or one positional one under ``""``.
        fp8: names of the layers that run in FP8 as the plugin is by default, in braces as a shell expands them.
        idle: the ones among them that turn out to run in BF16 in the first step.
        other: names of matrices that no linear layer holds, whether they are multiplied or not.
        needs: the package that it comes from.
        near: how far its loss may be from BF16's, relatively.
        mixed: float32 weights that compute in BF16, because the model multiplies BF16 weights with buffers that stay in
            float32.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]
    fp8: str
    idle: str = ""
    other: str = ""
    needs: str = "transformers"
    near: float = 0.02
    mixed: bool = False


def expand(text: str) -> list[str]:
    """``a.{b,c{d,e}} f`` to ``["a.b", "a.cd", "a.ce", "f"]``."""
    return list(dict.fromkeys(name for word in text.split() for name in _expand(word)))


def _expand(word: str) -> Iterator[str]:
    innermost = re.search(r"\{([^{}]*)\}", word)
    if innermost is None:
        yield word
        return
    for choice in innermost[1].split(","):
        yield from _expand(word[: innermost.start()] + choice + word[innermost.end() :])


def hf(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of transformers from its configuration."""

    def make() -> nn.Module:
        transformers = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()
        return getattr(transformers, name)(getattr(transformers, config)(**options))

    return make


def tokens(*names: str, rows: int = 2, length: int = 8) -> Callable[[], dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    return lambda: dict.fromkeys(names, ids)


def image(size: int = 32, **more: Any) -> Callable[[], dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, 3, size, size, generator=generator)
    return lambda: {"pixel_values": pixels, **more}


DECODER = {
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER_DECODER = {
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": HIDDEN,
    "decoder_ffn_dim": HIDDEN,
    "vocab_size": VOCABULARY,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": 32,
    "patch_size": 8,
}
LLAMA_BLOCK = "model.layers.1.{self_attn.{q,k,v,o}_proj,mlp.{gate,up,down}_proj}"
BART_ATTENTION = "{k,v,q,out}_proj"
BART = (
    f"model.encoder.layers.1.{{self_attn.{BART_ATTENTION},fc1,fc2}} "
    f"model.decoder.layers.1.{{self_attn.{BART_ATTENTION},encoder_attn.{BART_ATTENTION},fc1,fc2}}"
)


class Lora:
    """Llama with adapters of peft."""

    def __call__(self) -> nn.Module:
        peft = importlib.import_module("peft")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
        return peft.get_peft_model(hf("LlamaForCausalLM", "LlamaConfig", **DECODER)(), config)


class TorchTransformer(nn.Module):
    """torch.nn.Transformer between an embedding and a head."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, layers, layers, HIDDEN, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.head(self.transformer(x, x))


def timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of timm."""

    def make() -> nn.Module:
        with stand_in_for_torchvision():
            module = importlib.import_module("timm")
        return module.create_model(name, num_classes=8, **options)

    return make


@contextmanager
def stand_in_for_torchvision() -> Iterator[None]:
    """timm imports torchvision, of which its models use little; beside a torch for the CPU it may be missing."""
    if "timm" in sys.modules or importlib.util.find_spec("torchvision"):
        yield
        return
    parts = (
        "",
        ".datasets",
        ".ops",
        ".ops.misc",
        ".transforms",
        ".transforms.functional",
        ".models",
        ".models.feature_extraction",
    )
    modules: dict[str, Any] = {f"torchvision{part}": MagicMock() for part in parts}
    modules["torchvision.ops.misc"].FrozenBatchNorm2d = type("FrozenBatchNorm2d", (nn.Module,), {})
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def pixels(size: int = 32) -> Callable[[], dict[str, Any]]:
    batch = image(size)()
    return lambda: {"": batch["pixel_values"]}


TIMM_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": WIDTH, "depth": LAYERS, "num_heads": HEADS}

ZOO: dict[str, Animal] = {
    "llama": Animal(hf("LlamaForCausalLM", "LlamaConfig", **DECODER), tokens("input_ids", "labels"), LLAMA_BLOCK),
    "mistral": Animal(hf("MistralForCausalLM", "MistralConfig", **DECODER), tokens("input_ids", "labels"), LLAMA_BLOCK),
    "qwen3": Animal(
        hf("Qwen3ForCausalLM", "Qwen3Config", head_dim=8, **DECODER), tokens("input_ids", "labels"), LLAMA_BLOCK
    ),
    "gemma": Animal(
        hf("GemmaForCausalLM", "GemmaConfig", head_dim=8, **DECODER), tokens("input_ids", "labels"), LLAMA_BLOCK
    ),
    "gpt2": Animal(
        hf(
            "GPT2LMHeadModel", "GPT2Config", n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCABULARY,
            n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        ),
        tokens("input_ids", "labels"),
        "transformer.h.1.{attn.{c_attn,c_proj},mlp.{c_fc,c_proj}}",
    ),
    "mixtral": Animal(
        hf("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **DECODER),
        tokens("input_ids", "labels"),
        "model.layers.1.{self_attn.{q,k,v,o}_proj,mlp.experts.{gate_up,down}_proj}",
        other="model.layers.{0,1,2}.mlp.gate.weight",
    ),
    "deepseek_v3": Animal(
        hf(
            "DeepseekV3ForCausalLM", "DeepseekV3Config", **DECODER | {"num_key_value_heads": HEADS},
            moe_intermediate_size=16, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
            first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8,
            qk_nope_head_dim=8,
        ),
        tokens("input_ids", "labels"),
        "model.layers.1.{self_attn.{q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj},"
        "mlp.{shared_experts.{gate,up,down}_proj,experts.{gate_up,down}_proj}}",
        other="model.layers.{1,2}.mlp.gate.weight",
    ),
    "bert": Animal(
        hf(
            "BertForMaskedLM", "BertConfig",
            **{key: value for key, value in DECODER.items() if key != "num_key_value_heads"}, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        tokens("input_ids", "labels"),
        "bert.encoder.layer.1.{attention.{self.{query,key,value},output.dense},intermediate.dense,output.dense} "
        "cls.predictions.transform.dense",
    ),
    "t5": Animal(
        hf(
            "T5ForConditionalGeneration", "T5Config", d_model=WIDTH, d_kv=8, d_ff=HIDDEN, num_layers=LAYERS,
            num_heads=HEADS, vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0,
        ),
        tokens("input_ids", "labels"),
        "encoder.block.1.layer.{0.SelfAttention.{q,k,v,o},1.DenseReluDense.{wi,wo}} "
        "decoder.block.1.layer.{{0.SelfAttention,1.EncDecAttention}.{q,k,v,o},2.DenseReluDense.{wi,wo}}",
    ),
    "marian": Animal(
        hf(
            "MarianMTModel",
            "MarianConfig",
            **ENCODER_DECODER,
            max_position_embeddings=WIDTH,  # as long as the model is wide
        ),
        tokens("input_ids", "labels"),
        BART,
    ),
    "whisper": Animal(
        hf(
            "WhisperForConditionalGeneration", "WhisperConfig", **ENCODER_DECODER, num_mel_bins=8,
            max_source_positions=16, max_target_positions=16,
        ),
        lambda: {"input_features": torch.linspace(-1, 1, 2 * 8 * 32).view(2, 8, 32), **tokens("labels")()},
        BART,
        other="model.encoder.{conv1,conv2}",
    ),
    "vit": Animal(
        hf(
            "ViTForImageClassification", "ViTConfig", **VISION, num_labels=8, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        image(labels=torch.tensor([1, 2])),
        "vit.layers.1.{attention.{q,k,v,o}_proj,mlp.{fc1,fc2}}",
        other="vit.embeddings.{position_embeddings,patch_embeddings.projection}",
    ),
    "clip": Animal(
        hf(
            "CLIPModel", "CLIPConfig",
            text_config={key: value for key, value in DECODER.items() if key != "num_key_value_heads"},
            vision_config=VISION, projection_dim=16, logit_scale_init_value=0.0,
        ),
        lambda: image(return_loss=True)() | tokens("input_ids")(),
        "{text,vision}_model.encoder.layers.1.{self_attn.{k,v,q,out}_proj,mlp.{fc1,fc2}}",
        other="vision_model.embeddings.patch_embedding",
        near=0.05,  # its loss comes in BF16
    ),
    "mamba": Animal(
        hf(
            "MambaForCausalLM", "MambaConfig", hidden_size=WIDTH, num_hidden_layers=LAYERS, vocab_size=VOCABULARY,
            state_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        ),
        tokens("input_ids", "labels"),
        "backbone.layers.1.mixer.{in,x,out}_proj",
        other="backbone.layers.{0,1,2}.mixer.A_log",
    ),
    "timm_vit": Animal(
        timm("vit_tiny_patch16_224", **TIMM_VIT), pixels(),
        "blocks.1.{attn.{qkv,proj},mlp.{fc1,fc2}}",
        other="pos_embed patch_embed.proj",
        needs="timm",
    ),
    "timm_swin_v2": Animal(
        timm(
            "swinv2_tiny_window8_256", img_size=32, patch_size=4, embed_dim=16, depths=(1, 2, 1), num_heads=(2, 2, 2),
            window_size=4, drop_path_rate=0.0,
        ),
        pixels(),
        "layers.{1,2}.downsample.reduction layers.1.blocks.{0,1}.{attn.{qkv,proj},mlp.{fc1,fc2}}",
        idle="layers.1.blocks.{0,1}.attn.qkv",  # with a bias that it builds
        other="patch_embed.proj",
        needs="timm",
        mixed=True,
    ),
    "timm_eva02": Animal(
        timm("eva02_tiny_patch14_224", **TIMM_VIT), pixels(),
        "blocks.1.{attn.{qkv,proj},mlp.{fc1,fc2}}",
        idle="blocks.1.attn.qkv",
        other="pos_embed patch_embed.proj",
        needs="timm",
        mixed=True,
    ),
    "timm_convnext": Animal(
        timm("convnext_atto", depths=(1, 1, 1, 1), dims=(16, 32, 32, 32), conv_mlp=False),
        pixels(64),
        "stages.{1,2}.blocks.0.mlp.{fc1,fc2}",
        other="stem.0 stages.{1,2,3}.downsample.1",
        needs="timm",
    ),
    "torch_transformer": Animal(
        TorchTransformer,
        tokens("input_ids"),
        "transformer.{encoder,decoder}.layers.1.linear{1,2}",
        other="transformer.{encoder,decoder}.layers.{0,1,2}.self_attn.in_proj_weight "
        "transformer.decoder.layers.{0,1,2}.multihead_attn.in_proj_weight",
        needs="torch",
    ),
    "peft_lora": Animal(
        Lora(),
        tokens("input_ids", "labels"),
        "base_model.model.model.layers.1.{self_attn.{{q,v}_proj.base_layer,{k,o}_proj},"
        "mlp.{gate,up,down}_proj}",
        needs="peft",
    ),
}  # fmt: skip
