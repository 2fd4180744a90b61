"""``lightning-fp8 checkpoint inspect FILE`` and ``lightning-fp8 checkpoint convert IN OUT``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from lightning_fp8.cli.values import count
from lightning_fp8.delayed.history import validated_state
from lightning_fp8.files import replacing
from lightning_fp8.te.keys import EXTRA_STATE, is_grouped, slots_of_state
from lightning_fp8.te.te_state import TensorState, require_stored, te_states_in
from lightning_fp8.te.torch_file import CheckpointError, load_checkpoint
from lightning_fp8.te_checkpoints.remap import states_by_name

PLUGIN = "FP8Precision"
"""The key of the plugin's state in a Lightning checkpoint."""
AVERAGED = ("current_model_state", "state_dict")
"""The state dicts of one model in a checkpoint of Lightning's WeightAveraging: the trained weights and the average."""

_SAVED_BY = (
    ". The plugins save it in the checkpoints of a Trainer and of Fabric, FP8TrainerCallback in fp8_state.pt, "
    "fp8_state_dict(model) in other loops"
)


def main(argv: Sequence[str]) -> None:
    """Run the command. An error is printed in one line on the standard error, with exit status 1."""
    parser = argparse.ArgumentParser("lightning-fp8 checkpoint", description="The FP8 state in checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    inspecting = commands.add_parser("inspect", help="print the FP8 state of a checkpoint; no code in it is executed")
    inspecting.add_argument("file", type=Path, help="checkpoint of Lightning, Fabric, torch.save or Transformer Engine")
    inspecting.add_argument("--filter", default="*", metavar="GLOB", help="print tensors whose names match; default: *")
    inspecting.add_argument(
        "--worst", type=count, metavar="N", help="print the N tensors with the largest ratio of largest to newest amax"
    )
    converting = commands.add_parser(
        "convert", help="convert Transformer Engine's FP8 state to this package's, so that the file loads without it"
    )
    converting.add_argument("file", type=Path, metavar="IN", help="checkpoint with Transformer Engine's FP8 state")
    converting.add_argument("target", type=Path, metavar="OUT", help="file to write, which must not exist")
    args = parser.parse_args(argv)
    try:
        if args.command == "inspect":
            print(inspect(args.file, args.filter, args.worst))
        else:
            print(convert(args.file, args.target))
    except CheckpointError as error:
        raise SystemExit(f"lightning-fp8: {args.file}: {_printable(error)}") from None
    except IsADirectoryError:
        made_by = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {args.file} FILE"
        own = args.file / "fp8_state.pt"
        way_out = f"its FP8 state is in {own}" if own.is_file() else f"a sharded one is made a file by {made_by}"
        raise SystemExit(f"lightning-fp8: {args.file}: a folder; {way_out}") from None
    except OSError as error:
        raise SystemExit(f"lightning-fp8: {error}") from None
    except RecursionError:
        raise SystemExit(f"lightning-fp8: {args.file}: it nests too deep to be a checkpoint") from None


def inspect(path: str | os.PathLike[str], only: str = "*", worst: int | None = None) -> str:
    """A table of the FP8 state of all modules in the file, in Transformer Engine's format or in this package's.

    Args:
        path: the checkpoint file.
        only: a glob pattern; only tensors whose names match it are listed.
        worst: the number of tensors to list, those with the largest ratio of the history's largest amax to its newest
            first. A large ratio means that the scale is too small for the newest values. None lists all tensors in the
            file's order.

    Raises:
        CheckpointError: If the file or a state in it is damaged. The message names the module.
        OSError: If the file cannot be opened.
    """
    rows: list[tuple[float, tuple[str, ...]]] = []  # with the ratio
    writers = []
    for key, writer, tensor_states in _states(load_checkpoint(Path(path))[0]):
        writers.append(writer)
        if not tensor_states and fnmatchcase(key, only):
            rows.append((0.0, (_printable(key), "-", "-", "-", writer)))
        for name, tensor_state in tensor_states.items():
            if fnmatchcase(name, only):
                scale = f"{tensor_state.scale:.6g}" if tensor_state.scale else "not yet"
                amaxes = tensor_state.amax_history
                largest, newest = (float(amaxes.max()), float(amaxes[-1])) if len(amaxes) else (0.0, 0.0)
                shown = (f"{largest:.6g}", f"{newest:.6g}") if len(amaxes) else ("-", "-")
                rows.append((largest / newest if newest else 0.0, (_printable(name), scale, *shown, writer)))
    if not rows:
        return f"{path}: no FP8 state" + (f" of tensors called {only}" if writers else _SAVED_BY)
    if worst is not None:
        rows = sorted(rows, key=lambda row: -row[0])[:worst]
    lines = [("tensor", "scale", "largest amax", "newest amax", "written by"), *(cells for _, cells in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    table = ["  ".join([*(cell.ljust(width) for cell, width in zip(line, widths)), line[4]]) for line in lines]
    return "\n".join([f"{path}: FP8 state written by {'; '.join(dict.fromkeys(writers))}", *table])


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> str:
    """Write ``source`` to ``target``, with its Transformer Engine states converted to the plugin's state.

    Parameters keep their names. ``target`` is written atomically. If the file has several state dicts, one is converted
    and the others are listed, because the plugin's state belongs to one model. Both state dicts of WeightAveraging
    belong to the same model.

    Returns:
        A message with the result.

    Raises:
        CheckpointError: If the file is damaged, has no such state, or has objects that cannot be written; or if
            ``target`` exists, or its folder does not.
        OSError: If a file cannot be read or written.
    """
    source, target = Path(source), Path(target)
    if target.exists() and source.exists() and target.samefile(source):
        raise CheckpointError("IN and OUT are the same file; name another file for OUT")
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists; name another file, or remove it first")
    if not target.parent.is_dir():
        raise CheckpointError(f"{target.parent} is not a folder; create it first, or name a file in another folder")
    file, unread = load_checkpoint(source, check_sums=True)
    by_name = {key: states_by_name(value) for key, value in _dicts_in(file) if any(te_states_in(value))}
    if not by_name:
        raise CheckpointError("it has no Transformer Engine state to convert; this package's own needs no conversion")
    if unread:
        raise CheckpointError(
            f"it holds an object of {', '.join(unread)[:200]}, which cannot be written again without its class; save "
            "it without that"
        )
    main = AVERAGED[0] if AVERAGED[0] in by_name else next(iter(by_name))
    converted = [key for key in by_name if key == main or {key, main} == {*AVERAGED}]
    _, state, count = by_name[main]
    result = {"state_dict": file} if main is None else dict(file)
    for key in converted:
        result["state_dict" if key is None else key], _, _ = by_name[key]
    if state is not None:
        result[PLUGIN] = {"model": state}
    try:
        with replacing(target) as part:
            torch.save(result, part)
    except RecursionError:
        raise
    except RuntimeError as error:  # of torch, for a full disk
        raise CheckpointError(f"{target} cannot be written: {str(error).partition(chr(10))[0]}") from None
    num_tensors = len(state["names"]) if state else 0
    left = ", ".join(_printable(key) for key in by_name if key not in converted)
    others = f"; left as they were: those in {left}" if left else ""
    return (
        f"{target}: {count} modules' states converted, {num_tensors} tensors with a scale and an amax history{others}"
    )


def _states(file: Any) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The key, the writer and the states of tensors, for every state in the file."""
    te_states = [(key, holder, states) for key, holder in _dicts_in(file) if (states := [*te_states_in(holder)])]
    for index, (holder_key, holder, states) in enumerate(te_states):
        prefix = f"{holder_key}." if index else ""
        for key, te_state in states:
            owner = key.removesuffix(EXTRA_STATE).rstrip(".")
            slots = {} if is_grouped(owner, holder) else slots_of_state(owner, te_state.num_gemms)
            tensor_states = te_state.tensor_states(slots)
            yield prefix + key, te_state.writer, {prefix + name: item for name, item in tensor_states.items()}
    for key, state in _our_states(file):
        try:
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    require_stored(repr(name), value)
            names, scales, amax_history, _ = validated_state(state)
        except ValueError as error:
            raise CheckpointError(f"{key}: {error}") from None
        columns = map(TensorState, scales.tolist(), amax_history.unbind(1))
        yield key, "lightning_fp8", dict(zip(names, columns))


def _our_states(file: Any) -> Iterator[tuple[str, Any]]:
    """The FP8 states in the file with their keys: Lightning's, Fabric's under any key, or a bare state."""
    if not isinstance(file, dict):
        return
    if _is_ours(file):
        yield "FP8 state", file
    for key, value in file.items():
        if isinstance(value, dict) and _is_ours(value):
            yield str(key), value
        elif isinstance(value, dict):
            for model_name, state in value.items():
                if model_name != "recipe" and (key == PLUGIN or _is_ours(state)):
                    yield f"{key}.{model_name}", state


def _is_ours(value: Any) -> bool:
    return isinstance(value, dict) and {"names", "scale", "amax_history", "updates"} <= value.keys()


def _dicts_in(file: Any) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """The dictionaries that may have Transformer Engine's states: ``file``, with the key None, and its values."""
    if isinstance(file, dict):
        yield None, file
        yield from ((key, value) for key, value in file.items() if isinstance(value, dict) and key is not None)


def _printable(text: object) -> str:
    """``text`` from a file, with terminal control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
