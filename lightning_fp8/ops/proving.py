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
from pathlib import Path
from typing import IO, Any

import torch

from cuda_kernels.host import proofs
from cuda_kernels.host.proofs import Card, Refused, Unproven, Verdict, refusal
from cuda_kernels.kernel import KernelError

MARK = "lightning-fp8 proof: "
"""Before each line of JSON that the other process says."""

SECONDS = {"starting": 30.0, "loading": 300.0, "case": 60.0, "": 300.0}
"""How long the process may stay silent after it said this: a kernel runs, one is compiled, a reference is computed."""

COMMAND: Sequence[str] = (sys.executable, "-m", "lightning_fp8.proofs")

THREADS = "OMP_NUM_THREADS", "MKL_NUM_THREADS"

TRAPS = {"LIGHTNING_FP8_TRAP": "1"}
"""Barriers of kernels trap after some time: a hang becomes an error that the driver names."""


class NoProof(KernelError):
    """A proof could not be made now: the card is full or busy, or no process can be started. Nothing is kept of it."""


@dataclass
class Outcome:
    """What became of one plan's proof.

    Attributes:
        problem: why it failed; empty where all results were right.
        kernel: the last one that was started.
        loaded: the names of all that were loaded, by the keys of their verdicts.
        wrong: results were wrong, by any of these kernels.
        hung: the process did not answer in time.
        passing: the reason is not the kernels'.
    """

    problem: str = ""
    kernel: str = ""
    loaded: dict[str, str] = field(default_factory=dict)
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
        outcome = Outcome()
        try:
            self._send(request)
        except OSError as error:
            self.end()
            return Outcome(f"no process can be started for it ({error})", passing=True)
        said = ""
        while True:
            try:
                line = self._lines.get(timeout=SECONDS[said])
            except queue.Empty:
                self.end()
                outcome.problem = f"it still ran after {SECONDS[said]:g} s"
                outcome.hung, outcome.passing = said == "starting", said != "starting"
                return outcome
            if line is None:
                outcome.problem, outcome.passing = self._death(), not outcome.kernel
                self.end()
                return outcome
            message = json.loads(line)
            said = message["what"]
            if said == "loading":
                outcome.loaded[message["key"]] = message["kernel"]
            elif said == "starting":
                outcome.kernel = message["kernel"]
            elif said == "proven":
                return outcome
            elif said == "failed":
                outcome.problem, outcome.wrong = message["problem"], message["wrong"]
                outcome.passing = message["passing"] or not outcome.kernel
                if not message["goes_on"]:
                    self.end()
                return outcome

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
        for again in (True, False):
            if self._process is None or self._process.poll() is not None:
                self.end()
                self._start()
            assert self._process is not None
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(f"{json.dumps(request)}\n")
                return self._process.stdin.flush()
            except OSError:  # it ended just now, as it does when nothing is asked for some time
                self.end()
                if not again:
                    raise

    def _start(self) -> None:
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        # The specification runs on all cores, though launchers give each of their processes one.
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

    def _death(self) -> str:
        assert self._process is not None
        status = self._process.wait()
        last = next((line.strip() for line in reversed(self._errors) if line.strip()), "")
        how = f"exit status {status}"
        if status < 0:
            with suppress(ValueError):
                how = signal.Signals(-status).name
        return f"its process ended with {how}" + (f": {last}" if last and status > 0 else "")


def _read_along(stream: IO[str] | None, take: Callable[[str], None], at_end: Callable[[], None] = lambda: None) -> None:
    """Read a process's output in a thread, line by line."""
    assert stream is not None

    def read() -> None:
        with suppress(ValueError, OSError):  # closed meanwhile
            for line in stream:
                take(line)
        at_end()

    threading.Thread(target=read, daemon=True).start()


_prover = Prover()
_lock = threading.Lock()
_announced: set[Card] = set()
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
    _judge(outcome, unproven)


def prove_anew(plan: str, device: torch.device, key: Sequence[Any], card: Card) -> tuple[str, dict[str, str]]:
    """Prove the kernels of a plan whatever is known of them, and keep the verdicts.

    Returns:
        Why it failed, empty if all results were right; and the kernels' names by the keys of their verdicts.
    """
    with _lock, proofs.one_prover():
        outcome = _outcome(plan, device, key)
    if not outcome.passing:
        _keep(outcome, outcome.loaded, card)
    return outcome.problem, outcome.loaded


def _outcome(plan: str, device: torch.device, key: Sequence[Any]) -> Outcome:
    """Of a plan's proof; one that hangs is tried again with barriers that trap, for the message."""
    request = {"plan": plan, "device": str(device), "key": encoded(key)}
    outcome = _prover.outcome(request)
    if outcome.hung:
        with_traps = Prover(TRAPS)
        problem = with_traps.outcome(request).problem
        with_traps.end()
        outcome.problem += f" (with barriers that trap: {problem})" if problem else ""
    return outcome


def _judge(outcome: Outcome, unproven: Unproven) -> None:
    """Keep what a proof found.

    Raises:
        Refused, NoProof: see :func:`prove`.
    """
    card = unproven.card
    new = {key: kernel for key, kernel in outcome.loaded.items() if proofs.verdict_of(key) is None}
    if not outcome.problem:
        _keep(outcome, new, card)
        if unproven.key not in outcome.loaded:
            raise NoProof(f"{unproven}, and no test starts it")
        return
    for key in outcome.loaded:
        known = proofs.verdict_of(key)
        if known is not None and not known.proven:
            raise refusal(known)
    if outcome.passing:
        raise NoProof(f"{unproven}: {outcome.problem}; {proofs.VARIABLE}=0 uses it without the test")
    refused = _keep(outcome, new, card)
    if not refused:  # all that ran had been proven before
        raise Refused(f"{outcome.kernel} is not used on {card} for this plan: {outcome.problem}")
    raise refusal(refused[-1])


def _keep(outcome: Outcome, kernels: Mapping[str, str], card: Card) -> list[Verdict]:
    """Keep the verdicts on ``kernels``: of a proof that failed, on those that may have made it fail."""
    verdicts = []
    for key, kernel in kernels.items():
        if not outcome.problem or outcome.wrong or kernel == outcome.kernel:
            verdicts.append(Verdict(kernel, card.name, card.driver, not outcome.problem, outcome.problem))
            proofs.keep(key, verdicts[-1])
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
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a plan's key holds {value!r}")


def decoded(value: Any) -> Any:
    """The key of :func:`encoded`: sequences are tuples."""
    if isinstance(value, dict):
        return getattr(torch, value["dtype"])
    return tuple(map(decoded, value)) if isinstance(value, list) else value
