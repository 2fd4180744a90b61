"""Run by the processes of a mesh: models whose experts transformers divides over ranks itself, or one process.

``python -m tests.distributed.scripts.hf_experts FOLDER KIND FSDP_SIZE TP_SIZE EP_SIZE RECIPE PART``. It needs
transformers' DistributedConfig, of version 5, and accelerate.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_fp8 import convert_module, fp8_autocast, fp8_state_dict, load_fp8_state_dict
from lightning_fp8.modules.state import fp8_modules
from tests.distributed.launch import leave
from tests.distributed.scripts.fsdp import in_fp8

EXPERTS, ROWS, LAYERS = 4, 4, 2
GRADIENTS = "0.mlp.experts.gate_up_proj", "0.mlp.experts.down_proj", "embed_tokens.weight"
FOLDER, KIND, RECIPE = Path(), "", ""
FSDP, TP, EP = 1, 1, 1


def make(kind: str) -> Any:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
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
        "GptOss": ("GptOssConfig", "num_local_experts", {"layer_types": ["full_attention"] * LAYERS}),
    }[kind]
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")
    return model(getattr(transformers, config)(**sizes, **{experts: EXPERTS}, **more))  # type: ignore[arg-type]


def save(kind: str, folder: Path) -> None:
    make(kind).save_pretrained(folder / kind)


def loaded(divided: bool = True) -> Any:
    import transformers

    options: dict[str, Any] = {}
    if divided and FSDP * TP > 1:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(tp_size=TP, fsdp_size=FSDP, ep_size=EP)
    cls = getattr(transformers, f"{KIND}ForCausalLM")
    return cls.from_pretrained(FOLDER / KIND, dtype=torch.bfloat16, **options).train()


def whole(values: Tensor) -> Tensor:
    return values.full_tensor() if isinstance(values, DTensor) else values


def data() -> Tensor:
    """This rank's batch."""
    tokens = torch.randint(128, (ROWS, 32), generator=torch.Generator().manual_seed(1))
    return tokens.chunk(FSDP)[dist.get_rank() // TP]


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the gradients of the first step."""
    tokens, losses, gradients = data(), [], {}
    for step in range(steps):
        with fp8_autocast(enabled=RECIPE != "none", fp8_recipe="delayed" if RECIPE == "none" else RECIPE):
            loss: Any = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        losses.append(float(loss))
        if not step:
            gradients = {n: whole(each.grad).float() for n, each in model.named_parameters() if each.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def converted(model: Any) -> Any:
    return model if RECIPE == "none" else convert_module(model, first_last_layers_bf16=False)


def part_train() -> dict[str, Any]:
    model = converted(loaded())
    losses, gradients = train(model, torch.optim.SGD(model.parameters(), 0.1), 1)
    state = fp8_state_dict(model)
    return {
        "losses": losses,
        "gradients": {name: each.tolist() for name, each in gradients.items() if name.endswith(GRADIENTS)},
        "names": state["names"],
        "scales": dict(zip(state["names"], state["scale"].tolist())),
        "amaxes": dict(zip(state["names"], state["amax_history"][-1].tolist() if len(state["amax_history"]) else [])),
        "fp8": {name: module.record.fp8 for name, module in fp8_modules(model)},
        "cut": [name for name, each in model.named_parameters() if isinstance(each, DTensor) and "experts" in name],
        "gathered": in_fp8(model),
    }


def part_before() -> dict[str, Any]:
    """The loss of a model that is converted before its experts are divided over ranks, which have one batch."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    model = converted(loaded(divided=False))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    experts = [name for name, each in model.named_modules() if name.endswith("experts")]
    weights = {
        f"{n}.{weight}": "grouped_gemm" for n in experts for weight, _ in model.get_submodule(n).named_parameters()
    }
    apply_expert_parallelism(model, mesh, mesh, {**weights, **dict.fromkeys(experts, "ep_dispatch_experts")})
    with fp8_autocast(fp8_recipe=RECIPE):
        tokens = data()
        loss: Any = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    state = fp8_state_dict(model)
    return {
        "losses": [float(loss)],
        "names": state["names"],
        "fp8": {n: each.record.fp8 for n, each in fp8_modules(model)},
    }


def part_resume() -> dict[str, Any]:
    """A run that is saved and loaded beside one that is not."""

    def new() -> tuple[Any, torch.optim.Optimizer]:
        model = converted(loaded())
        return model, torch.optim.AdamW(model.parameters(), 1e-3)

    model, optimizer = new()
    train(model, optimizer, 2)
    own = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(own, checkpoint_id=FOLDER / "checkpoint")
    torch.save(fp8_state_dict(model), FOLDER / f"{dist.get_rank()}.pt")
    straight, _ = train(model, optimizer, 2)

    model, optimizer = new()
    into = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(into, checkpoint_id=FOLDER / "checkpoint")
    set_model_state_dict(model, into["model"])
    set_optimizer_state_dict(model, optimizer, into["optimizer"])
    load_fp8_state_dict(model, torch.load(FOLDER / f"{dist.get_rank()}.pt"))
    resumed, _ = train(model, optimizer, 2)
    return {"straight": straight, "resumed": resumed}


if __name__ == "__main__":
    torch.set_num_threads(1)
    FOLDER, KIND, RECIPE = Path(sys.argv[1]), sys.argv[2], sys.argv[6]
    FSDP, TP, EP = map(int, sys.argv[3:6])
    dist.init_process_group("gloo")
    report = globals()[f"part_{sys.argv[7]}"]()
    (FOLDER / f"{os.environ['RANK']}.json").write_text(json.dumps(report))
    leave()
