"""Proves the kernels of a plan on this GPU in a separate process, before this process launches them.

The other process (``python -m lightning_fp8.proofs``) gets the key of a plan. It launches the plan's kernels on small
tensors, ragged tensors and tensors that fill the GPU, and compares the results with the specification. It prints a line
before each action, so the last line identifies a kernel that hangs or crashes. One process proves several plans; if it
ends, a new one is started. The verdicts are stored in files, see :mod:`cuda_kernels.host.proofs`.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import IO, Any

import torch

from cuda_kernels.host import proofs
from cuda_kernels.host.proofs import Card, Unproven, Verdict, refusal
from cuda_kernels.kernel import KernelError

MARK = "lightning-fp8 proof: "
"""The prefix of each line of JSON that the other process prints."""

SECONDS = {"starting": 30.0, "compiling": 300.0, "loading": 60.0, "case": 60.0, "": 300.0}
"""The time limits in seconds for the next line, by the kind of the last one."""

CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, getattr(signal, "SIGBUS", signal.SIGABRT)}
"""The signals by which a kernel or the driver ends a process. Others are sent by the system or by users."""

proofs.SOURCES.extend(Path(__file__).parents[1] / folder for folder in ("ops", "attention/ops", "proofs"))

COMMAND: Sequence[str] = (sys.executable, "-m", "lightning_fp8.proofs")

THREADS = "OMP_NUM_THREADS", "MKL_NUM_THREADS"
"""The variables that the process does not inherit, because launchers limit each of their processes to one core."""

TRAPS = {"LIGHTNING_FP8_TRAP": "1"}
"""The variables that let barriers of kernels trap after some time, so that a hang becomes an error of the driver."""


class NoProof(KernelError):
    """A kernel has no verdict because the GPU is full or busy, or no process can be started. It is not stored."""


@dataclass
class Outcome:
    """The outcome of one plan's proof.

    Attributes:
        problem: the reason of the failure; empty if all results were right.
        culprit: the key of the kernel that was launched last.
        loaded: the names of all bound kernels, by the keys of their verdicts.
        started: the keys of the kernels that were launched.
        wrong: whether results were wrong, which any of these kernels may have caused.
        hung: whether the process did not answer in time.
        passing: whether the failure is temporary, and not caused by the kernels.
    """

    problem: str = ""
    culprit: str = ""
    loaded: dict[str, str] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    wrong: bool = False
    hung: bool = False
    passing: bool = False


class Prover:
    """A process that proves plans. The first plan starts it.

    Args:
        variables: additional environment variables for the process.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._variables = variables or {}
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: IO[str]

    def outcome(self, request: Mapping[str, Any]) -> Outcome:
        """Prove one plan."""
        outcome, said = Outcome(), ""
        try:
            self._send(request)
        except (OSError, TypeError, ValueError) as error:
            self.end()
            return Outcome(f"no process can be started for it ({error})", passing=True)
        while (line := self._next(said)) is not None:
            message = json.loads(line)
            said = message["what"]
            if said == "loading":
                outcome.loaded[message["key"]] = message["kernel"]
            elif said == "starting":
                outcome.culprit = message["key"]
                outcome.started.add(message["key"])
            elif said == "proven":
                return outcome
            elif said == "failed":
                outcome.problem, outcome.wrong = message["problem"], message["wrong"]
                outcome.passing = message["passing"] or not outcome.culprit
                if not message["goes_on"]:
                    self.end()
                return outcome
        outcome.problem, passing = self._death(said)
        outcome.passing = passing or not outcome.culprit
        outcome.hung = self._is_alive() and said == "starting"
        self.end()
        return outcome

    def _next(self, said: str) -> str | None:
        """The next line of the process; None if it has ended, or exceeds its time limit."""
        with suppress(queue.Empty):
            return self._lines.get(timeout=SECONDS[said])
        return None

    def _is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def end(self) -> None:
        """End the process, without waiting for one that hangs in the driver."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
        for stream in (process.stdin, process.stdout, self._errors):
            with suppress(OSError):
                if stream is not None and process.returncode is not None:
                    stream.close()

    def _send(self, request: Mapping[str, Any]) -> None:
        if not self._is_alive():
            self.end()
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()

    def _start(self) -> None:
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        inherited = {name: value for name, value in os.environ.items() if name not in THREADS}
        environment = {
            **inherited, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONFAULTHANDLER": "1",
            "CUDA_LAUNCH_BLOCKING": "1", **self._variables,
        }  # fmt: skip
        self._lines = queue.SimpleQueue()
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        lines, output = self._lines, self._process.stdout
        assert output is not None

        def read() -> None:
            with suppress(ValueError, OSError):  # the stream was closed
                for line in output:
                    if line.startswith(MARK):
                        lines.put(line.removeprefix(MARK))
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()

    def _death(self, said: str) -> tuple[str, bool]:
        """The reason why there is no next line, and whether it is temporary, and not caused by a kernel."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            if self._lines.empty():
                self._process.wait(0.5)
        status = self._process.poll()
        if status is None:
            return f"it was still running after {SECONDS[said]:g} s", said != "starting"
        self._errors.seek(0)
        last = self._errors.read().strip().rpartition("\n")[2].strip()
        if status >= 0:
            return f"its process ended with exit status {status}" + (f": {last}" if last else ""), True
        with suppress(ValueError):
            return f"its process ended with {signal.Signals(-status).name}", -status not in CRASHES
        return f"its process ended with signal {-status}", True


IDLE = 60.0
"""The time in seconds after the last plan until the process is ended, since it occupies memory of the GPU."""

_prover = Prover()
_lock = threading.Lock()
_announced: set[Card] = set()
_unable: dict[Card, str] = {}
"""The GPUs on which no process could be started, with the reason. Starting one is not tried again."""
atexit.register(_prover.end)


def prove(plan: str, device: torch.device, key: Sequence[Any], unproven: Unproven) -> None:
    """Prove the kernels of a plan, and store the verdicts.

    Args:
        plan: the name of the plan, which selects its cases in :mod:`lightning_fp8.proofs.cases`.
        key: the key of the plan.
        unproven: the error that requires the proof.

    Raises:
        Refused: If a kernel of the plan failed, now or earlier.
        NoProof: If there is no verdict.
    """
    card = unproven.card
    with _lock, proofs.one_prover():
        if proofs.verdict_of(unproven.key) is not None:  # another process stored a verdict
            return
        if card in _unable:
            raise NoProof(f"{unproven}: {_unable[card]}; set {proofs.VARIABLE}=0 to use it without the test")
        if card not in _announced:
            _announced.add(card)
            print(
                f"FP8 kernels are tested on {card} before they are used, once for each driver and version; "
                f"set {proofs.VARIABLE}=0 to skip the tests",
                file=sys.stderr,
            )
        start = time.monotonic()
        outcome = _outcome(plan, device, key)
        names = ", ".join(dict.fromkeys(outcome.loaded.values())) or plan
        print(f"  {names}: {outcome.problem or 'right'} ({time.monotonic() - start:.1f} s)", file=sys.stderr)
        if outcome.passing and not outcome.loaded:
            _unable[card] = outcome.problem
        _judge(outcome, unproven)


def prove_anew(plan: str, device: torch.device, key: Sequence[Any], card: Card) -> tuple[str, dict[str, str]]:
    """Prove the kernels of a plan again, regardless of existing verdicts, and store the new ones.

    Returns:
        The reason of the failure, or an empty string, and the names of its kernels by the keys of their verdicts.
    """
    with _lock, proofs.one_prover():
        outcome = _outcome(plan, device, key)
        if not outcome.passing:
            _keep(outcome, card)
    return outcome.problem, outcome.loaded


def _outcome(plan: str, device: torch.device, key: Sequence[Any]) -> Outcome:
    """The outcome of a plan's proof. If it hangs, it is repeated with barriers that trap, for the error message."""
    global _end_of_idling
    try:
        request = {"plan": plan, "device": str(device), "key": encoded(key)}
    except TypeError as error:
        return Outcome(str(error), passing=True)
    _end_of_idling.cancel()
    outcome = _prover.outcome(request)
    _end_of_idling = threading.Timer(IDLE, _end_idle)
    _end_of_idling.daemon = True
    _end_of_idling.start()
    if outcome.hung:
        with_traps = Prover(TRAPS)
        problem = with_traps.outcome(request).problem
        with_traps.end()
        outcome.problem += f" (with barriers that trap: {problem})" if problem else ""
    return outcome


def _end_idle() -> None:
    """End the process, unless another proof has begun."""
    if _lock.acquire(blocking=False):
        try:
            _prover.end()
        finally:
            _lock.release()


_end_of_idling = threading.Timer(IDLE, _end_idle)
"""Ends the process :data:`IDLE` seconds after the last plan. Each plan starts a new timer."""


def _judge(outcome: Outcome, unproven: Unproven) -> None:
    """Store the verdicts of a proof.

    Raises:
        Refused, NoProof: See :func:`prove`.
    """
    card = unproven.card
    if outcome.problem:
        for key in outcome.loaded:
            known = proofs.verdict_of(key)
            if known is not None and not known.proven:
                raise refusal(known)
        if outcome.passing:
            raise NoProof(f"{unproven}: {outcome.problem}; set {proofs.VARIABLE}=0 to use it without the test")
    kept = _keep(outcome, card)
    if not outcome.problem:
        if unproven.key not in outcome.started:
            raise NoProof(f"{unproven}, and no test launches it")
    else:
        raise refusal(kept[-1])


def _keep(outcome: Outcome, card: Card) -> list[Verdict]:
    """Store the verdicts of the kernels that were launched. A kernel that was refused stays refused.

    A crash or a hang refuses the kernel that was launched last. Wrong results refuse all kernels that were not proven
    before, or all kernels if all were proven.
    """
    known = {key: proofs.verdict_of(key) for key in outcome.started}
    new = [key for key, verdict in known.items() if verdict is None]
    meant = new
    if outcome.problem:
        meant = (new or [*known]) if outcome.wrong else [outcome.culprit]
    verdicts = []
    for key in meant:
        before = known[key]
        if before is None or before.proven:
            verdict = Verdict(outcome.loaded[key], card.name, card.driver, not outcome.problem, outcome.problem)
            proofs.keep(key, verdict)
            verdicts.append(verdict)
    return verdicts


# --- Keys of plans as text --------------------------------------------------------------------------------------------


def encoded(value: Any) -> Any:
    """The key of a plan in JSON types: dtypes are names, and all sequences are lists.

    Raises:
        TypeError: If the type of a value is not supported.
    """
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (tuple, list)):
        return [encoded(each) for each in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Real):  # including NumPy's
        return float(value)
    raise TypeError(f"a plan's key contains {value!r}, whose type is not supported")


def decoded(value: Any) -> Any:
    """The inverse of :func:`encoded`: sequences are tuples."""
    if isinstance(value, dict):
        return getattr(torch, value["dtype"])
    return tuple(map(decoded, value)) if isinstance(value, list) else value
