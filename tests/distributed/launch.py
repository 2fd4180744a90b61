"""Start a module of this folder in two processes, as a cluster would."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).parent.parent.parent


def leave() -> None:
    """End this rank together with the others, without the interpreter's shutdown.

    Threads of gloo and of distributed checkpoints may still run then, and abort it now and then.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def run_on_two_ranks(module: str, *args: str, folder: Path) -> list[Any]:
    """Run ``python -m tests.distributed.scripts.<module>`` on ranks 0 and 1; their reports, by rank.

    Raises:
        AssertionError: a rank failed; the message ends with what it printed last.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "NODE_RANK": "0",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.distributed.scripts.{module}", *args],
            cwd=ROOT,
            env={**os.environ, **common, "LOCAL_RANK": str(rank), "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs):
        assert process.returncode == 0, output[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
