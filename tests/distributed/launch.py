"""Run scripts of this folder on two ranks, as a cluster would.

A program that has imported all they need waits for them, and forks a pair of ranks for each: none imports anew, which
would take longer than what it does, and none finds what another one left.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import selectors
import socket
import subprocess
import sys
import time
import traceback
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).parent.parent.parent
SECONDS, SECONDS_AFTER_A_FAILURE = 600, 10
"""Of a script, and of one of its ranks after the other has failed, which it may wait for."""


def leave() -> None:
    """End this rank together with the others, without the interpreter's shutdown.

    Threads of gloo and of distributed checkpoints may still run then, and abort it now and then.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def run_on_two_ranks(module: str, *args: str, folder: Path) -> list[Any]:
    """:func:`run_on_ranks` of two."""
    return run_on_ranks(module, *args, folder=folder, ranks=2)


def run_on_ranks(module: str, *args: str, folder: Path, ranks: int) -> list[Any]:
    """Run ``python -m tests.distributed.scripts.<module>`` on so many ranks; their reports, by rank.

    Raises:
        AssertionError: a rank failed; the message ends with what it printed last.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0"}
    of_ranks = [{**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    failed = run_script(module, args, of_ranks)
    assert not failed, failed
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def run_script(module: str, args: tuple[str, ...], environments: list[dict[str, str]]) -> str:
    """Run a script in a process for each of ``environments``; what the first that failed printed last, or ``""``."""
    waiting = _waiting_program()
    assert waiting.stdin is not None
    assert waiting.stdout is not None
    waiting.stdin.write(json.dumps([module, args, environments]) + "\n")
    waiting.stdin.flush()
    return str(json.loads(waiting.stdout.readline()))


@cache
def _waiting_program() -> subprocess.Popen[str]:
    """One for all tests of this process; it ends when its input does."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.launch"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def end() -> None:
    """End the program that waits for scripts, if it was started."""
    if _waiting_program.cache_info().currsize:
        _waiting_program().communicate()
        _waiting_program.cache_clear()


# --- The program that waits -------------------------------------------------------------------------------------------


def _wait_for_scripts() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.disable()
    for each in sorted((Path(__file__).parent / "scripts").glob("[a-z]*.py")):
        import_module(f"tests.distributed.scripts.{each.stem}")
    gc.freeze()  # what is imported stays: no rank looks for garbage there
    gc.enable()
    for line in sys.stdin:
        answers.write(json.dumps(_run(*json.loads(line))) + "\n")
        answers.flush()


def _run(module: str, args: list[str], environments: list[dict[str, str]]) -> str:
    selector, printed = selectors.DefaultSelector(), {}
    for environment in environments:
        read, write = os.pipe()
        process = os.fork()
        if not process:
            _be_a_rank(module, args, environment, write)
        os.close(write)
        printed[process] = b""
        selector.register(read, selectors.EVENT_READ, process)
    failed, end = [], time.monotonic() + SECONDS
    while selector.get_map():
        ready = selector.select(max(0.0, end - time.monotonic()))
        for process in {key.data for key in selector.get_map().values()} if not ready else ():
            os.kill(process, 9)
        for key, _ in ready:
            text = os.read(key.fd, 65536)
            printed[key.data] += text
            if not text:  # it has ended
                selector.unregister(key.fd)
                os.close(key.fd)
                if os.waitpid(key.data, 0)[1]:
                    failed.append(key.data)
                    end = min(end, time.monotonic() + SECONDS_AFTER_A_FAILURE)
    return (printed[failed[0]].decode(errors="replace")[-3000:] or "a rank was ended") if failed else ""


def _be_a_rank(module: str, args: list[str], environment: dict[str, str], output: int) -> None:
    """As ``python -m tests.distributed.scripts.<module>``; does not return."""
    code = 1
    try:
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.close(output)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(environment)
        name = f"tests.distributed.scripts.{module}"
        sys.argv = [name, *args]
        del sys.modules[name]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _wait_for_scripts()
