"""Run by two processes: ranks that cut a model differently, or run it by different recipes, and what each says.

``python -m tests.distributed.scripts.unlike_plans FOLDER recipes|plans|scales``
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_fp8 import convert_module, fp8_autocast
from lightning_fp8.parallel import styles
from tests.distributed.launch import leave
from tests.distributed.scripts.tensor_parallel import SHAPE, WIDTH, blocks, cut


def error(unlike: str) -> str:
    second = bool(dist.get_rank())
    kind = "plain" if unlike == "plans" and second else "once"
    recipe = "rowwise" if unlike == "recipes" and second else "delayed"
    model = convert_module(cut(blocks(), kind, styles, init_device_mesh("cpu", (2,))), first_last_layers_bf16=False)
    x = torch.randn(*SHAPE, WIDTH).bfloat16()
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    try:
        with fp8_autocast(fp8_recipe=recipe, fp8_group=alone if unlike == "scales" else None):
            model(x if kind == "plain" else x.chunk(2, 1)[dist.get_rank()].contiguous())
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(error(sys.argv[2])))
    leave()
