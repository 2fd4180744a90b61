"""Subprocesses with a time limit, and what they print."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cuda_kernels.host.proofs import VARIABLE as PROOF_VARIABLE

FP8_CAPABILITY = (8, 9)
"""The first compute capability with FP8 tensor cores (Ada)."""

KERNELS = {
    "product of blocks": ("product, 1x128 by 128x128", "product, 1x128 by 128x128, mma.sync"),
    "scales": ("update_scales",),
    "norm": ("statistics", "norm backward"),
    "attention": ("attention's cast", "attention forward, 128 channels", "attention backward, 128 channels"),
}
"""Kinds of kernels (``lightning_fp8/proofs/kinds.py``) that are started, by the names of their probes."""

MARK = "lightning-fp8 doctor says: "
"""Prefix of a probe's result. Other code in the process, such as ``sitecustomize``, may print other lines."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a process. ``status`` is negative for a signal, and None if the time limit was exceeded."""

    status: int | None
    output: str = ""
    error: str = ""

    @property
    def said(self) -> str:
        """The result that a probe printed; empty if it printed none."""
        return _marked(self.output)

    @property
    def last_line(self) -> str:
        """Why the process ended: the probe's own error line, or the last line of its error output."""
        lines = [line.strip() for line in (_marked(self.error) or self.error).splitlines() if line.strip()]
        if self.status is not None and self.status < 0:
            with suppress(ValueError):
                return f"ended by {signal.Signals(-self.status).name}" + (f": {lines[-1]}" if lines else "")
        return lines[-1] if lines else f"exit status {self.status}, without a message"

    @property
    def place(self) -> str:
        """Source line of the innermost Python function if the process dumped its stack; else empty."""
        found = re.search(r'most recent call first\):\s+File "([^"]+)", line (\d+) in (\S+)', self.error)
        return f"{Path(found[1]).name}:{found[2]}, {found[3]}" if found else ""


def _marked(text: str) -> str:
    return next(iter(re.findall(f"^{MARK}(.*)$", text, re.MULTILINE)), "")


def probe(name: str, seconds: float, **variables: str) -> Answer:
    """Run a probe in a subprocess, ``lightning_fp8/doctor/run.py``, with additional environment ``variables``."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    # Probes compare results themselves, so kernels are not proven in these processes.
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", PROOF_VARIABLE: "0", **variables}
    return answer_of([sys.executable, "-m", "lightning_fp8.doctor.run", name, str(seconds)], seconds, environment)


def answer_of(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> Answer:
    """Run ``command`` for at most ``seconds``.

    It is killed after that, but waited for only 1 s more: even SIGKILL does not end a process that hangs in a driver.
    Output goes to files, since a pipe stays open as long as any child process lives.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as error:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=error, env=environment, start_new_session=True
        )
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(seconds)
        finally:  # also on KeyboardInterrupt
            if status is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1)
        for file in (output, error):
            file.seek(0)
        return Answer(status, *(file.read().decode(errors="replace") for file in (output, error)))
