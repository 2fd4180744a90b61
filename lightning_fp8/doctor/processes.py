"""Questions asked in processes of their own: what hangs or crashes there is an answer here."""

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

PACKAGES = Path(__file__).parent.parent.parent
"""Where this package lies."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a process.

    Attributes:
        status: its exit status, below 0 for a signal; None if it was still running at the time limit.
        output: on its standard output.
        error: on its standard error.
    """

    status: int | None
    output: str = ""
    error: str = ""

    @property
    def last_word(self) -> str:
        """The last line that says why it ended."""
        said = [line.strip() for line in self.error.splitlines() if line.strip()]
        if self.status is not None and self.status < 0:
            with suppress(ValueError):
                return f"ended by {signal.Signals(-self.status).name}" + (f": {said[-1]}" if said else "")
        return said[-1] if said else f"exit status {self.status}, without a word"

    @property
    def place(self) -> str:
        """The line of the innermost Python function, if the process dumped its stack; else empty."""
        found = re.search(r'most recent call first\):\s+File "([^"]+)", line (\d+) in (\S+)', self.error)
        return f"{Path(found[1]).name}:{found[2]}, {found[3]}" if found else ""


def ask(module_name: str, *arguments: str, limit: float, variables: Mapping[str, str] | None = None) -> Answer:
    """Run ``module_name`` of this package as a program, for at most ``limit`` seconds, with more ``variables``."""
    path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **(variables or {})}
    return answer_of([sys.executable, "-m", f"{__package__}.{module_name}", *arguments], limit, environment)


def answer_of(command: Sequence[str], limit: float, environment: Mapping[str, str] | None = None) -> Answer:
    """Run ``command`` for at most ``limit`` seconds.

    It is not waited for longer: a process that hangs inside a driver cannot be ended, not even by SIGKILL. Its output
    goes to files, since children of its own that live on would keep pipes open.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as error:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=error, env=environment, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        except KeyboardInterrupt:
            _end(process)
            raise
        if status is None:
            _end(process)
        texts = []
        for file in (output, error):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Answer(status, *texts)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(1)
