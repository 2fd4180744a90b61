"""Run by the processes of a mesh: models whose experts transformers spreads over ranks itself, beside one process.

``python -m tests.distributed.scripts.hf_experts FOLDER KIND FSDP_SIZE TP_SIZE EP_SIZE RECIPE``. It needs accelerate.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_fp8 import convert_module, fp8_autocast, fp8_state_dict
from lightning_fp8.modules.state import fp8_modules
from tests.distributed.launch import leave

EXPERTS, ROWS, STEPS = 4, 4, 3


def make(kind: str) -> Any:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "num_experts_per_tok": 2,
        "initializer_range": 0.1,
    }
    config, experts, more = {
        "Mixtral": ("MixtralConfig", "num_local_experts", {}),
        "Qwen3Moe": ("Qwen3MoeConfig", "num_experts", {"moe_intermediate_size": 96}),
        "GptOss": ("GptOssConfig", "num_local_experts", {"layer_types": ["full_attention"] * 2}),
    }[kind]
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")
    return model(getattr(transformers, config)(**sizes, **{experts: EXPERTS}, **more))  # type: ignore[arg-type]


def save(kind: str, folder: Path) -> None:
    make(kind).save_pretrained(folder / kind)


def loaded(folder: Path, kind: str, fsdp: int, tp: int, ep: int) -> Any:
    import transformers

    options: dict[str, Any] = {}
    if fsdp * tp > 1:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(tp_size=tp, fsdp_size=fsdp, ep_size=ep)
    cls = getattr(transformers, f"{kind}ForCausalLM")
    return cls.from_pretrained(folder / kind, dtype=torch.bfloat16, **options).train()


def whole(values: Tensor) -> Tensor:
    return values.full_tensor() if isinstance(values, DTensor) else values


def trained(model: Any, recipe: str, own: slice) -> dict[str, Any]:
    tokens = torch.randint(128, (ROWS, 32), generator=torch.Generator().manual_seed(1))[own]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, gradients = [], {}
    for step in range(STEPS):
        with fp8_autocast(enabled=recipe != "none", fp8_recipe="delayed" if recipe == "none" else recipe):
            loss: Any = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        losses.append(float(loss))
        if step == 0:
            gradients = {
                name: whole(each.grad).float() for name, each in model.named_parameters() if each.grad is not None
            }
        optimizer.step()
        optimizer.zero_grad()
    state = fp8_state_dict(model)
    return {
        "losses": losses,
        "gradients": {name: float(each.double().norm()) for name, each in gradients.items()},
        "scales": state["scale"].tolist() if "scale" in state else [],
        "names": [name for name, _ in fp8_modules(model)],
        "fp8": [module.record.fp8 for _, module in fp8_modules(model)],
        "dtensors": [name for name, each in model.named_parameters() if isinstance(each, DTensor)],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, kind, recipe = Path(sys.argv[1]), sys.argv[2], sys.argv[6]
    fsdp, tp, ep = map(int, sys.argv[3:6])
    dist.init_process_group("gloo")
    model = loaded(folder, kind, fsdp, tp, ep)
    if recipe != "none":
        convert_module(model, first_last_layers_bf16=False)
    each = ROWS // fsdp
    at = dist.get_rank() // tp * each
    report = trained(model, recipe, slice(at, at + each))
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(report))
    leave()
