"""``lightning-fp8 checkpoint inspect FILE`` and ``lightning-fp8 checkpoint convert IN OUT``."""

from __future__ import annotations

import argparse
import io
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from lightning_fp8.delayed.history import validated_state
from lightning_fp8.te.keys import EXTRA_STATE, is_grouped
from lightning_fp8.te.remap import states_by_name
from lightning_fp8.te.te_state import TensorState, te_states_in
from lightning_fp8.te.torch_file import (
    DTYPES,
    Buffer,
    CheckpointError,
    Global,
    Standin,
    Storage,
    TensorRecord,
    open_checkpoint,
)

PLUGIN = "FP8Precision"
"""The key under which Lightning keeps the plugin's state."""
AVERAGED = ("current_model_state", "state_dict")
"""What Lightning's WeightAveraging keeps of one model: what is trained, and the average."""


def main(argv: Sequence[str]) -> None:
    """Run the command; an error is one line on the standard error, and exit status 1."""
    parser = argparse.ArgumentParser("lightning-fp8 checkpoint", description="FP8 state in checkpoints")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect_parser = commands.add_parser("inspect", help="print the FP8 state of a checkpoint; nothing of it is run")
    inspect_parser.add_argument("file", type=Path)
    inspect_parser.add_argument("--filter", default="*", metavar="GLOB", help="print the tensors of these names alone")
    inspect_parser.add_argument(
        "--worst",
        type=_count,
        metavar="N",
        help="print the N tensors whose scales are stalest: largest over newest amax",
    )
    convert_parser = commands.add_parser(
        "convert", help="turn Transformer Engine's FP8 state into ours, so that the file loads anywhere"
    )
    convert_parser.add_argument("source", type=Path, metavar="IN")
    convert_parser.add_argument("target", type=Path, metavar="OUT")
    args = parser.parse_args(argv)
    file = args.file if args.command == "inspect" else args.source
    try:
        if args.command == "inspect":
            print(inspect(args.file, args.filter, args.worst))
        else:
            print(convert(args.source, args.target))
    except CheckpointError as error:
        raise SystemExit(f"lightning-fp8: {file}: {_printable(error)}") from None
    except OSError as error:
        raise SystemExit(f"lightning-fp8: {error}") from None
    except RecursionError:
        raise SystemExit(f"lightning-fp8: {file}: it nests too deep to be a checkpoint") from None


def _count(text: str) -> int:
    if not (text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def inspect(path: Path, only: str = "*", worst: int | None = None) -> str:
    """A table of every module's FP8 state in the file, Transformer Engine's or ours.

    Args:
        only: a glob of names.
        worst: how many tensors, those with the largest ratio of the history's largest amax to the newest first: their
            scales are the most too small. None is all, in the file's order.

    Raises:
        CheckpointError: the file or a state in it is damaged; the message names the module.
        OSError: there is no such file.
    """
    with open_checkpoint(path) as file:
        lines: list[tuple[str, ...]] = []
        ratios: list[float] = []
        writers = []
        for key, writer, tensor_states in _states(file):
            if writer not in writers:
                writers.append(writer)
            if not tensor_states and fnmatchcase(key, only):
                lines.append((_printable(key), "-", "-", "-", writer))
                ratios.append(0.0)
            for name, tensor_state in tensor_states.items():
                if not fnmatchcase(name, only):
                    continue
                scale = f"{tensor_state.scale:.6g}" if tensor_state.scale else "not yet"
                amaxes = tensor_state.amax_history
                largest, newest = (f"{x:.6g}" for x in (amaxes.max(), amaxes[-1])) if len(amaxes) else ("-", "-")
                lines.append((_printable(name), scale, largest, newest, writer))
                ratios.append(float(amaxes.max() / amaxes[-1]) if len(amaxes) and amaxes[-1] > 0 else 0.0)
    if not lines:
        return f"{path}: no FP8 state" + (f" of tensors called {only}" if writers else "")
    if worst is not None:
        lines = [lines[index] for index in sorted(range(len(lines)), key=lambda index: -ratios[index])[:worst]]
    head = ("tensor", "scale", "largest amax", "newest amax", "written by")
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(4)]
    table = ["  ".join([*(cell.ljust(width) for cell, width in zip(line, widths)), line[4]]) for line in [head, *lines]]
    return "\n".join([f"{path}: FP8 state written by {'; '.join(writers)}", *table])


def convert(source: Path, target: Path) -> str:
    """Write ``target``: ``source`` with its Transformer Engine states as the plugin's state. Says what was done.

    Parameters keep their names. ``target`` appears whole or not at all. Of several state dicts one is converted, and
    the others are named: the plugin's state is of one model. Both of WeightAveraging are of the same.

    Raises:
        CheckpointError: the file is damaged, holds no such state, or holds objects that cannot be written again; or
            ``target`` is there, or its folder is not.
        OSError: a file cannot be read or written.
    """
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists; name another file, or remove it first")
    if not target.parent.is_dir():
        raise CheckpointError(f"{target.parent} is no folder; make it first, or name a file in another")
    with open_checkpoint(source) as file:
        by_name = {key: states_by_name(value) for key, value in _dicts_in(file) if any(te_states_in(value))}
        if not by_name:
            raise CheckpointError("it holds no Transformer Engine state: there is nothing to convert")
        main = AVERAGED[0] if AVERAGED[0] in by_name else next(iter(by_name))
        converted = [key for key in by_name if key == main or {key, main} == {*AVERAGED}]
        _, state, count = by_name[main]
        content = {"state_dict": file} if main is None else dict(file)
        for key in converted:
            content["state_dict" if key is None else key], _, _ = by_name[key]
        result = _loaded(content, source, {})
        if state is not None:
            result[PLUGIN] = {"model": state}
        _save(result, target)
    num_tensors = len(state["names"]) if state else 0
    left = [_printable(key) for key in by_name if key not in converted]
    return f"{target}: {count} modules' states converted, {num_tensors} tensors with a scale and an amax history" + (
        f"; left as they were: those in {', '.join(left)}" if left else ""
    )


def _states(file: Any) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Key, writer and tensors' states of every state in the file."""
    first = True
    for holder_key, holder in _dicts_in(file):
        te_states = [*te_states_in(holder)]
        prefix = "" if first else f"{holder_key}."
        for key, te_state in te_states:
            owner = key.removesuffix(EXTRA_STATE).rstrip(".")
            tensor_states = {} if is_grouped(owner, holder) else te_state.named_tensor_states(owner)
            yield prefix + key, te_state.writer, {prefix + name: item for name, item in tensor_states.items()}
        first = first and not te_states
    for key, state in _our_states(file):
        try:
            names, scale, amax_history, _ = validated_state(_loaded_state(state, Path(key)))
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


def _dicts_in(file: Any) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """The dictionaries that may hold Transformer Engine's states: ``file`` itself, under None, and its values."""
    if isinstance(file, dict):
        yield None, file
        yield from ((key, value) for key, value in file.items() if isinstance(value, dict) and key is not None)


def _loaded_state(state: Any, path: Path) -> Any:
    """As :func:`_loaded`, of a state of ours, none of whose tensors takes more memory than its bytes in the file."""
    for key, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, TensorRecord) and value.repeats:
            raise CheckpointError(f"{key!r} has shape {value.shape} and {value.storage.numel} stored values")
    return _loaded(state, path, {})


def _loaded(value: Any, path: Path, memo: dict[int, Any]) -> Any:
    """``value`` with its tensors read. ``memo`` has what was read by ``id``: a value may be in many places."""
    if id(value) not in memo:
        memo[id(value)] = _read(value, path, memo)
    return memo[id(value)]


def _read(value: Any, path: Path, memo: dict[int, Any]) -> Any:
    if isinstance(value, TensorRecord):
        return value.load()
    if isinstance(value, Buffer):
        return io.BytesIO(value.getvalue())
    if isinstance(value, Global) and value.name in DTYPES:
        return DTYPES[value.name]
    if isinstance(value, (Standin, Storage, Global)):
        name = getattr(value, "name", "torch.storage")
        raise CheckpointError(
            f"{path} holds an object of {name[:200]}, which cannot be written again without its class"
        )
    if isinstance(value, dict):
        items = {key: _loaded(item, path, memo) for key, item in value.items()}
        return Counter(items) if isinstance(value, Counter) else items
    if isinstance(value, (list, tuple)):
        return type(value)(_loaded(item, path, memo) for item in value)
    return value


def _printable(text: object) -> str:
    """``text`` of a file for a terminal, which it must not steer."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def _save(value: Any, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")  # mkstemp's could be read by its owner alone
    try:
        torch.save(value, temporary)
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, RuntimeError) and not isinstance(error, RecursionError):  # torch's of a full disk, ...
            raise CheckpointError(f"{target} cannot be written: {str(error).partition(chr(10))[0]}") from None
        raise
