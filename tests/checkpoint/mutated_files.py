"""``python -m tests.checkpoint.mutated_files N``: read N mutated checkpoint values; exit 1 if one did what none may.

Hypothesis draws the mutations. An audit hook watches what Python does meanwhile, and a limit on the address space
turns any large allocation into an error that is not ours.
"""

from __future__ import annotations

import codecs
import io
import pickle
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from lightning_fp8.te.te_state import read_te_state
from lightning_fp8.te.torch_file import CheckpointError

# What reading data must not do. compile and import are also how a late import of torch would show.
FORBIDDEN = ("exec", "compile", "import", "open", "os.", "subprocess.", "socket.", "pickle.", "ctypes.", "shutil.")
HEADROOM = 256 << 20

watching = False
events: list[str] = []
outcomes = {"read": 0, "refused": 0}


def audit(event: str, args: Any) -> None:
    if watching and event.startswith(FORBIDDEN):
        events.append(f"{event} {args!r}"[:300])


def archives() -> list[tuple[Any, bytes]]:
    state = {
        "scale_fwd": torch.ones(3),
        "amax_history_fwd": torch.rand(4, 3),
        "scale_bwd": torch.ones(2),
        "amax_history_bwd": torch.rand(4, 2),
        "extra_fp8_variables": {"num_gemms": 1, "fp8_checkpoint": True, "names": ["a", ("b", 2.5)]},
    }
    zipped, legacy = io.BytesIO(), io.BytesIO()
    torch.save(state, zipped)
    torch.save(state, legacy, _use_new_zipfile_serialization=False)
    return [
        (lambda data: read_te_state(io.BytesIO(data)), zipped.getvalue()),
        (lambda data: read_te_state(io.BytesIO(data)), legacy.getvalue()),
        (read_te_state, pickle.dumps(state)),
    ]


def mutate(data: bytes, edits: list[tuple[str, int, int]]) -> bytes:
    mutated = bytearray(data)
    for kind, position, byte in edits:
        if not mutated:
            break
        position %= len(mutated)
        if kind == "set":
            mutated[position] = byte
        elif kind == "insert":
            mutated.insert(position, byte)
        elif kind == "delete":
            del mutated[position : position + byte]
        elif kind == "repeat":
            mutated[position:position] = mutated[position : position + byte]
        else:
            del mutated[position:]
    return bytes(mutated)


EDIT = st.tuples(
    st.sampled_from(["set", "set", "insert", "delete", "repeat", "cut"]), st.integers(0, 1 << 20), st.integers(0, 255)
)
ARCHIVES = archives()


@given(which=st.integers(0, len(ARCHIVES) - 1), edits=st.lists(EDIT, min_size=1, max_size=6))
def read_one(which: int, edits: list[tuple[str, int, int]]) -> None:
    global watching
    read, data = ARCHIVES[which]
    data = mutate(data, edits)
    watching = True
    try:
        read(data)
        outcomes["read"] += 1
    except CheckpointError:
        outcomes["refused"] += 1
    finally:
        watching = False


def main(count: int) -> int:
    sys.addaudithook(audit)
    for read, data in ARCHIVES:
        read(data)  # what is imported late is imported now
    for codec in ("raw_unicode_escape", "cp437"):  # those of pickletools and zipfile
        codecs.lookup(codec)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + HEADROOM, in_use + HEADROOM))
    options = settings(max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    seed(20)(options(read_one))()
    print(f"{sum(outcomes.values())} files: {outcomes}; {events[:5]}")
    return 1 if events or min(outcomes.values()) == 0 or sum(outcomes.values()) < count else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
