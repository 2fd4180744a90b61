"""Has a card prove the kernels of a plan, in a process of its own, before this process starts them.

The other process (``python -m lightning_fp8.proofs``) gets a plan's key, starts its kernels on small tensors, ragged
ones and ones that fill the card, and compares the results with the specification. It says what it does, line by line;
what it said last tells which kernel hangs or crashes. It serves one plan after the other, and is replaced where it
ended. The verdicts are kept in files: :mod:`cuda_kernels.host.proofs`.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
"""Before each line of JSON that the other process says."""

SECONDS = {"starting": 30.0, "compiling": 300.0, "loading": 60.0, "case": 60.0, "": 300.0}
"""How long the process may stay silent after it said this: a kernel runs, one is compiled, a reference is computed."""

CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, getattr(signal, "SIGBUS", signal.SIGABRT)}
"""Signals by which a kernel or the driver ends a process; others come from outside."""

proofs.SOURCES.extend(Path(__file__).parents[1] / folder for folder in ("ops", "attention/ops", "proofs"))

COMMAND: Sequence[str] = (sys.executable, "-m", "lightning_fp8.proofs")

THREADS = "OMP_NUM_THREADS", "MKL_NUM_THREADS"
"""Variables that the process does not inherit: launchers give each of their processes one core."""

TRAPS = {"LIGHTNING_FP8_TRAP": "1"}
"""Barriers of kernels trap after some time: a hang becomes an error that the driver names."""


class NoProof(KernelError):
    """A proof could not be made now: the card is full or busy, or no process can be started. Nothing is kept of it."""


@dataclass
class Outcome:
    """What became of one plan's proof.

    Attributes:
        problem: why it failed; empty where all results were right.
        culprit: the key of the kernel that was started last.
        loaded: the names of all that launches were bound to, by the keys of their verdicts.
        started: the keys of those that were started.
        wrong: results were wrong, by any of these kernels.
        hung: the process did not answer in time.
        passing: the reason is not the kernels'.
    """

    problem: str = ""
    culprit: str = ""
    loaded: dict[str, str] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    wrong: bool = False
    hung: bool = False
    passing: bool = False


class Prover:
    """A process that proves plans, started by the first one.

    Args:
        variables: more environment variables for it.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._variables = variables or {}
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: list[str] = []

    def outcome(self, request: Mapping[str, Any]) -> Outcome:
        """Prove one plan."""
        outcome, said = Outcome(), ""
        try:
            self._send(request)
        except (OSError, TypeError, ValueError) as error:
            self.end()
            return Outcome(f"no process can be started for it ({error})", passing=True)
        line = self._next(said)
        while True:
            if line is None:
                outcome.problem, outcome.passing = self._death(said)
                outcome.passing = outcome.passing or not outcome.culprit
                outcome.hung = self._is_alive() and said == "starting"
                self.end()
                return outcome
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
            line = self._next(said)

    def _next(self, said: str) -> str | None:
        """The next line that the process says; None if it ended, or stays silent for too long."""
        try:
            return self._lines.get(timeout=SECONDS[said])
        except queue.Empty:
            return None

    def _is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def end(self) -> None:
        """End the process; one that hangs inside a driver is not waited for."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
        for stream in (process.stdin, process.stdout, process.stderr):
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
        self._lines, self._errors = queue.SimpleQueue(), []
        self._process = process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        lines, errors = self._lines, self._errors

        def take(line: str) -> None:
            if line.startswith(MARK):
                lines.put(line.removeprefix(MARK))

        _read_along(process.stdout, take, at_end=lambda: lines.put(None))
        _read_along(process.stderr, errors.append)

    def _death(self, said: str) -> tuple[str, bool]:
        """Why no more is said, and whether that is no kernel's fault."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            if self._lines.empty():
                self._process.wait(0.5)
        status = self._process.poll()
        if status is None:
            return f"it still ran after {SECONDS[said]:g} s", said != "starting"
        last = next((line.strip() for line in reversed(self._errors) if line.strip()), "")
        if status >= 0:
            return f"its process ended with exit status {status}" + (f": {last}" if last else ""), True
        with suppress(ValueError):
            return f"its process ended with {signal.Signals(-status).name}", -status not in CRASHES
        return f"its process ended with signal {-status}", True


def _read_along(stream: IO[str] | None, take: Callable[[str], None], at_end: Callable[[], None] = lambda: None) -> None:
    """Read a process's output in a thread, line by line."""
    assert stream is not None

    def read() -> None:
        with suppress(ValueError, OSError):  # closed meanwhile
            for line in stream:
                take(line)
        at_end()

    threading.Thread(target=read, daemon=True).start()


IDLE = 60.0
"""Seconds after the last plan when the process is ended, since it keeps memory of the card."""

_prover = Prover()
_lock = threading.Lock()
_announced: set[Card] = set()
_unable: dict[Card, str] = {}
"""Cards on which no process could prove anything, and why: it is not tried again."""
atexit.register(_prover.end)


def prove(plan: str, device: torch.device, key: Sequence[Any], unproven: Unproven) -> None:
    """Have the kernels of a plan proven, and keep the verdicts.

    Args:
        plan: its name, by which :mod:`lightning_fp8.proofs.cases` has cases.
        key: the rest of its key.
        unproven: the error that asked for it.

    Raises:
        Refused: a kernel of the plan failed, now or before.
        NoProof: no verdict could be had.
    """
    card = unproven.card
    with _lock, proofs.one_prover():
        if proofs.verdict_of(unproven.key) is not None:  # another process proved it meanwhile
            return
        if card in _unable:
            raise NoProof(f"{unproven}: {_unable[card]}; {proofs.VARIABLE}=0 uses it without the test")
        if card not in _announced:
            _announced.add(card)
            print(
                f"FP8 kernels are tested on {card} before they are used, once for each driver and version; "
                f"{proofs.VARIABLE}=0 skips it",
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
    """Prove the kernels of a plan whatever is known of them, and keep the verdicts.

    Returns:
        Why it failed, empty if all results were right; and the names of its kernels by the keys of their verdicts.
    """
    with _lock, proofs.one_prover():
        outcome = _outcome(plan, device, key)
        if not outcome.passing:
            _keep(outcome, card)
    return outcome.problem, outcome.loaded


def _outcome(plan: str, device: torch.device, key: Sequence[Any]) -> Outcome:
    """Of a plan's proof; one that hangs is tried again with barriers that trap, for the message."""
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
    """End the process, unless a plan is being proven again."""
    if _lock.acquire(blocking=False):
        try:
            _prover.end()
        finally:
            _lock.release()


_end_of_idling = threading.Timer(IDLE, _end_idle)
"""Of the plan that was proven last; started with it."""


def _judge(outcome: Outcome, unproven: Unproven) -> None:
    """Keep what a proof found.

    Raises:
        Refused, NoProof: see :func:`prove`.
    """
    card = unproven.card
    if outcome.problem:
        for key in outcome.loaded:
            known = proofs.verdict_of(key)
            if known is not None and not known.proven:
                raise refusal(known)
        if outcome.passing:
            raise NoProof(f"{unproven}: {outcome.problem}; {proofs.VARIABLE}=0 uses it without the test")
    kept = _keep(outcome, card)
    if not outcome.problem:
        if unproven.key not in outcome.started:
            raise NoProof(f"{unproven}, and no test starts it")
    else:
        raise refusal(kept[-1])


def _keep(outcome: Outcome, card: Card) -> list[Verdict]:
    """Keep the verdicts on the kernels that were started; one that was refused stays refused.

    A proof that failed is of the kernel that was started last, or, where results were wrong, of all that had not been
    proven before; if there is none, of all.
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


# --- Plans' keys as text ----------------------------------------------------------------------------------------------


def encoded(value: Any) -> Any:
    """A plan's key as JSON takes it: dtypes by their names, all sequences as lists.

    Raises:
        TypeError: it is none that plans have.
    """
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (tuple, list)):
        return [encoded(each) for each in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Real):  # NumPy's, too
        return float(value)
    raise TypeError(f"a plan's key holds {value!r}")


def decoded(value: Any) -> Any:
    """The key of :func:`encoded`: sequences are tuples."""
    if isinstance(value, dict):
        return getattr(torch, value["dtype"])
    return tuple(map(decoded, value)) if isinstance(value, list) else value
