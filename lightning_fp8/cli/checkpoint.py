"""``lightning-fp8 checkpoint inspect FILE`` and ``lightning-fp8 checkpoint convert IN OUT``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_fp8.checkpoint.remap import states_by_name
from lightning_fp8.delayed.saved import validated_state
from lightning_fp8.te.keys import EXTRA_STATE, has_te_state, is_grouped, is_state
from lightning_fp8.te.te_state import TensorState, read_te_state
from lightning_fp8.te.torch_file import Storage, TensorRecord, open_checkpoint
from lightning_fp8.te.unpickle import CheckpointError, Global, Standin

PLUGIN = "FP8Precision"
"""The key under which Lightning keeps the plugin's state."""


def main(argv: Sequence[str]) -> None:
    """Run the command; an error is one line on the standard error, and exit status 1."""
    parser = argparse.ArgumentParser("lightning-fp8 checkpoint", description="FP8 state in checkpoints")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect_parser = commands.add_parser("inspect", help="print the FP8 state of a checkpoint; nothing of it is run")
    inspect_parser.add_argument("file", type=Path)
    convert_parser = commands.add_parser(
        "convert", help="turn Transformer Engine's FP8 state into ours, so that the file loads anywhere"
    )
    convert_parser.add_argument("source", type=Path, metavar="IN")
    convert_parser.add_argument("target", type=Path, metavar="OUT")
    args = parser.parse_args(argv)
    file = args.file if args.command == "inspect" else args.source
    try:
        if args.command == "inspect":
            print(inspect(args.file))
        else:
            print(convert(args.source, args.target))
    except CheckpointError as error:
        raise SystemExit(f"lightning-fp8: {file}: {error}") from None
    except OSError as error:
        raise SystemExit(f"lightning-fp8: {error}") from None
    except RecursionError:
        raise SystemExit(f"lightning-fp8: {file}: it nests too deep to be a checkpoint") from None


def inspect(path: Path) -> str:
    """A table of every module's FP8 state in the file, Transformer Engine's or ours.

    Raises:
        CheckpointError: the file or a state in it is damaged; the message names the module.
        OSError: there is no such file.
    """
    with open_checkpoint(path) as file:
        lines = []
        writers = []
        for key, writer, tensor_states in _states(file):
            if writer not in writers:
                writers.append(writer)
            if not tensor_states:
                lines.append((key, "-", "-", "-", writer))
            for name, tensor_state in tensor_states.items():
                scale = f"{tensor_state.scale:.6g}" if tensor_state.scale else "not yet"
                amaxes = tensor_state.amax_history
                largest, newest = (f"{x:.6g}" for x in (amaxes.max(), amaxes[-1])) if len(amaxes) else ("-", "-")
                lines.append((name, scale, largest, newest, writer))
    if not lines:
        return f"{path}: no FP8 state"
    head = ("tensor", "scale", "largest amax", "newest amax", "written by")
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(4)]
    table = ["  ".join([*(cell.ljust(width) for cell, width in zip(line, widths)), line[4]]) for line in [head, *lines]]
    return "\n".join([f"{path}: FP8 state written by {'; '.join(writers)}", *table])


def convert(source: Path, target: Path) -> str:
    """Write ``target``: ``source`` with its Transformer Engine states as the plugin's state. Says what was done.

    Parameters keep their names. ``target`` appears whole or not at all.

    Raises:
        CheckpointError: the file is damaged, holds no such state, or holds objects that cannot be written again.
        OSError: a file cannot be read or written.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists; name another file, or remove it first")
    with open_checkpoint(source) as file:
        holder = _state_dict_in(file)
        if holder is None:
            raise CheckpointError("it holds no Transformer Engine state: there is nothing to convert")
        parameters, state, count = states_by_name(holder)
        result = _loaded(file, source)
        if holder is file:
            result = {"state_dict": _loaded(parameters, source)}
        else:
            key = next(key for key, value in file.items() if value is holder)
            result[key] = _loaded(parameters, source)
        if state is not None:
            result[PLUGIN] = {"model": state}
        _save(result, target)
    num_tensors = len(state["names"]) if state else 0
    return f"{target}: {count} modules' states converted, {num_tensors} tensors with a scale and an amax history"


def _states(file: Any) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Key, writer and tensors' states of every state in the file."""
    holder = _state_dict_in(file)
    for key, value in (holder or {}).items():
        if is_state(key):
            try:
                te_state = read_te_state(_bytes_of(value))
            except CheckpointError as error:
                raise CheckpointError(f"{key}: {error}") from None
            owner = key.removesuffix(EXTRA_STATE).rstrip(".")
            yield key, te_state.writer, {} if is_grouped(owner, holder or {}) else te_state.named_tensor_states(owner)
    for key, state in _our_states(file):
        try:
            names, scale, amax_history, _ = validated_state(_loaded(state, Path(key)))
        except ValueError as error:
            raise CheckpointError(f"{key}: {error}") from None
        tensor_states = {
            name: TensorState(scale[index].item(), amax_history[:, index]) for index, name in enumerate(names)
        }
        yield key, "lightning_fp8", tensor_states


def _our_states(file: Any) -> Iterator[tuple[str, Any]]:
    """Each FP8 state in the file and its key: Lightning's, what Fabric saved under any key, and one by itself."""
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


def _state_dict_in(file: Any) -> dict[str, Any] | None:
    """The dictionary in ``file`` that holds Transformer Engine's states: itself, or one of its values."""
    if not isinstance(file, dict):
        return None
    for candidate in (file, *file.values()):
        if isinstance(candidate, dict) and has_te_state(key for key in candidate if isinstance(key, str)):
            return candidate
    return None


def _bytes_of(value: Any) -> Any:
    return value.load() if isinstance(value, TensorRecord) else value


def _loaded(value: Any, path: Path) -> Any:
    """``value`` with its tensors read."""
    if isinstance(value, TensorRecord):
        return value.load()
    if isinstance(value, (Standin, Storage, Global)):
        name = getattr(value, "name", "torch.storage")
        raise CheckpointError(
            f"{path} holds an object of {name[:200]}, which cannot be written again without its class"
        )
    if isinstance(value, dict):
        return {key: _loaded(item, path) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_loaded(item, path) for item in value)
    return value


def _save(value: Any, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")  # mkstemp's could be read by its owner alone
    try:
        torch.save(value, temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
