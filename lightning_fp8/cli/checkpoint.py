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
from lightning_fp8.files import replacing
from lightning_fp8.te.keys import EXTRA_STATE, is_grouped
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
from lightning_fp8.te_checkpoints.remap import states_by_name

PLUGIN = "FP8Precision"
"""The key of the plugin's state in a Lightning checkpoint."""
AVERAGED = ("current_model_state", "state_dict")
"""The state dicts of one model in a checkpoint of Lightning's WeightAveraging: the trained weights and the average."""


def main(argv: Sequence[str]) -> None:
    """Run the command. An error is printed in one line on the standard error, with exit status 1."""
    parser = argparse.ArgumentParser("lightning-fp8 checkpoint", description="FP8 state in checkpoints")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect_parser = commands.add_parser(
        "inspect", help="print the FP8 state of a checkpoint; no code in it is executed"
    )
    inspect_parser.add_argument("file", type=Path)
    inspect_parser.add_argument("--filter", default="*", metavar="GLOB", help="print only tensors whose names match")
    inspect_parser.add_argument(
        "--worst",
        type=_count,
        metavar="N",
        help="print the N tensors whose scales are stalest: largest over newest amax",
    )
    convert_parser = commands.add_parser(
        "convert", help="convert Transformer Engine's FP8 state to this package's, so that the file loads without it"
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


def inspect(path: str | os.PathLike[str], only: str = "*", worst: int | None = None) -> str:
    """Return a table of the FP8 state of all modules in the file.

    The state may be in Transformer Engine's format or in this package's.

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
    with open_checkpoint(Path(path)) as file:
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
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists; name another file, or remove it first")
    if not target.parent.is_dir():
        raise CheckpointError(f"{target.parent} is not a folder; create it first, or name a file in another folder")
    with open_checkpoint(source) as file:
        by_name = {key: states_by_name(value) for key, value in _dicts_in(file) if any(te_states_in(value))}
        if not by_name:
            raise CheckpointError("it has no Transformer Engine state to convert")
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
    """The key, the writer and the states of tensors, for every state in the file."""
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


def _loaded_state(state: Any, path: Path) -> Any:
    """:func:`_loaded` for a state of this package. It checks that tensors do not take more memory than in the file."""
    for key, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, TensorRecord) and value.repeats:
            raise CheckpointError(f"{key!r} has shape {value.shape} and {value.storage.numel} stored values")
    return _loaded(state, path, {})


def _loaded(value: Any, path: Path, memo: dict[int, Any]) -> Any:
    """``value`` with its tensors loaded. ``memo`` caches loaded values by ``id``, since values may repeat."""
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
    """``text`` from a file, with terminal control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def _save(value: Any, target: Path) -> None:
    try:
        with replacing(target) as part:
            torch.save(value, part)
    except RecursionError:
        raise
    except RuntimeError as error:  # of torch, for a full disk
        raise CheckpointError(f"{target} cannot be written: {str(error).partition(chr(10))[0]}") from None
