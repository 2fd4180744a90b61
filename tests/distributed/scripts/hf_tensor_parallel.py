"""Run by two processes: transformers' own tensor parallelism of a Llama, beside one process. It needs accelerate.

``python -m tests.distributed.scripts.hf_tensor_parallel FOLDER RECIPE``
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fp8 import convert_module, fp8_autocast
from lightning_fp8.modules.state import fp8_modules
from tests.distributed.launch import leave


def report(folder: Path, recipe: str) -> dict[str, Any]:
    saved = folder / "llama"
    if not dist.get_rank():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
        LlamaForCausalLM(config).save_pretrained(saved)
    dist.barrier()
    tokens = torch.randint(128, (2, 32), generator=torch.Generator().manual_seed(1))
    found: dict[str, Any] = {}
    for name, options in (("cut", {"tp_plan": "auto"}), ("alone", {})):
        model = LlamaForCausalLM.from_pretrained(saved, dtype=torch.bfloat16, **options).train()
        assert isinstance(model.model.layers[1].mlp.up_proj.weight, DTensor) == (name == "cut")
        convert_module(model, first_last_layers_bf16=False)
        with fp8_autocast(fp8_recipe=recipe):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        model.eval()
        with torch.no_grad(), fp8_autocast(fp8_recipe=recipe):
            evaluated = model(tokens, labels=tokens, use_cache=False).loss
        gradients = [
            (each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad).double().norm().item()
            for each in model.parameters()
        ]
        records = [module.record.fp8 for _, module in fp8_modules(model)]
        found[name] = {"losses": [float(loss), float(evaluated)], "records": records, "gradients": gradients}
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(report(folder, sys.argv[2])))
    leave()
