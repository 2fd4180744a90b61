"""Host time of a whole layer: part of suite ``host``, and a command that measures any version of the package.

    python benchmarks/suites/layer_host.py                            # the installed package, or that of PYTHONPATH
    python benchmarks/suites/layer_host.py --beside ~/other_checkout  # and another version, with the same code

    python benchmarks/suites/layer_host.py --beside ~/a ~/b --write out.json  # several others, as a file of results

The versions run alternately, in processes, and the minimum of each version's times counts. Nothing of ``benchmarks`` is
imported for a measurement, so that one file measures all. The package must have ``Linear``, ``fp8_autocast`` and
``make_recipe``, and what the two context managers replace.

- ``Linear forward``, ``Linear backward``: the ops' CUDA implementations run on CPU tensors, with a stub driver that
  launches nothing: all of the host's work except the driver's part of launches.
  ``torch.autograd alone`` is a function with the same inputs and outputs that computes only the bias' gradient, as a
  layer does; times above it are the layer's own.
- ``Llama block``: likewise a decoder layer of transformers, delayed, with and without fused norms and MLPs. torch's own
  part of it runs on the CPU with its arithmetic, which is small; in ``torch`` all of it does.
- ``Linear step``: forward and backward of a tiny layer on the CPU, where its arithmetic hardly counts, compared with
  torch's own layer and torchao's emulation of FP8.

CPU time of the calling thread is measured, which also runs the backward of CPU tensors: other load hardly counts in it.
Contexts are entered, and delayed scaling has its scales, before the measurement; updates of scales are not included.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import thread_time
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

OURS = "lightning_fp8"
RECIPES = "delayed", "tensorwise"
ON_A_CARD = 64, 64
"""Rows and features of a layer on the simulated GPU: few, so that torch's own work on the CPU hardly counts."""
ON_THE_CPU = 8, 64
BLOCK = 64, 64
"""Rows and width of the decoder layer."""
FUSED = {"not fused": False, "fused": True}
STEPS, STEPS_BEFORE = 200, 3
"""Steps per measurement, and before it, in which delayed scaling computes its scales."""
ALONE = "torch.autograd alone"
PASSES = 8
"""The least decile counts, because other load on the machine only adds time."""


class LayerTime(NamedTuple):
    """Host microseconds, forward and backward; ``note`` is the reason if there are none.

    ``frames``: of a ``Linear``, the calls of the package's Python functions, forward and backward.
    """

    name: str
    by: str
    shape: tuple[int, int]
    forward: float | None
    backward: float | None
    note: str | None = None
    frames: tuple[int, int] | None = None


def layer_times(steps: int = STEPS, passes: int = PASSES, on_the_cpu: bool = True) -> list[LayerTime]:
    """The times of all layers, measured alternately in each pass; without ``on_the_cpu`` no ``Linear step``."""
    rows, features = ON_THE_CPU
    makers: dict[str, Callable[[], nn.Module]] = {"torch": lambda: _linear(nn.Linear, features)}
    if find_spec("torchao"):
        makers["torchao, emulated"] = lambda: _of_torchao(features)
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(passes):
        times.setdefault(("Linear", ALONE), []).append(_of_layer(_linear(_Alone, ON_A_CARD[1]), ON_A_CARD[0], steps))
        for recipe in RECIPES:
            times.setdefault(("Linear", recipe), []).append(_of_ours(recipe, *ON_A_CARD, steps, True))
            if on_the_cpu:
                times.setdefault(("Linear step", recipe), []).append(_of_ours(recipe, *ON_THE_CPU, steps, False))
        if find_spec("transformers"):
            for by, fuse in {"torch": None, **FUSED}.items():
                times.setdefault(("Llama block", by), []).append(_of_block(fuse, steps))
        for by, make in makers.items() if on_the_cpu else ():
            times.setdefault(("Linear step", by), []).append(_of_layer(make(), rows, steps))
    best = {key: tuple(map(min, zip(*of_passes))) for key, of_passes in times.items()}
    frames = {("Linear", recipe): _frames(recipe) for recipe in RECIPES}
    sizes = {"Linear": ON_A_CARD, "Llama block": BLOCK}
    found = [
        LayerTime(name, _by(by), sizes.get(name, ON_THE_CPU), forward, backward, frames=frames.get((name, by)))
        for (name, by), (forward, backward) in best.items()
    ]
    if on_the_cpu and "torchao, emulated" not in makers:
        found.append(LayerTime("Linear step", "torchao, emulated", ON_THE_CPU, None, None, "torchao is not installed"))
    return found


def _by(maker: str) -> str:
    return OURS if maker == RECIPES[0] else f"{OURS}, {maker}" if maker in (*RECIPES, *FUSED) else maker


class _AloneFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(x.shape[0], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), dy.sum(0, dtype=torch.float32).to(dy.dtype)


class _Alone(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = _AloneFunction.apply(input, self.weight, self.bias)
        return y


def _linear(kind: Callable[..., nn.Module], features: int) -> nn.Module:
    return kind(features, features).to(torch.bfloat16)


def _of_torchao(features: int) -> nn.Module:
    float8: Any = import_module("torchao.float8")
    model = nn.Sequential(_linear(nn.Linear, features))
    converted: nn.Module = float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True))[0]
    return converted


def _of_ours(recipe: str, rows: int, features: int, steps: int, on_a_card: bool) -> tuple[float, float]:
    with _trained(recipe, rows, features, on_a_card) as layer:
        return _of_layer(layer, rows, steps)


def _frames(recipe: str) -> tuple[int, int]:
    """The calls of the package's Python functions in a forward and a backward of a layer on the simulated GPU."""
    import cuda_kernels
    import lightning_fp8

    packages = tuple(str(Path(str(package.__file__)).parent) for package in (lightning_fp8, cuda_kernels))
    calls: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(packages):
            calls.append(frame.f_code.co_name)

    with _trained(recipe, *ON_A_CARD, True) as layer:
        _of_layer(layer, ON_A_CARD[0], STEPS_BEFORE)
        x = torch.randn(ON_A_CARD, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(ON_A_CARD, dtype=torch.bfloat16)
        sys.setprofile(note)
        y = layer(x)
        of_forward = len(calls)
        y.backward(dy)
        sys.setprofile(None)
    return of_forward, len(calls) - of_forward


@contextmanager
def _trained(recipe: str, rows: int, features: int, on_a_card: bool) -> Iterator[nn.Module]:
    """Context of an FP8 region, with a layer that has its scales; ``on_a_card``: on the simulated GPU."""
    import lightning_fp8

    layer = _linear(lightning_fp8.Linear, features)
    made = lightning_fp8.make_recipe(recipe)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for _ in range(3):  # so that delayed scaling has its scales before the driver is replaced by a stub
        with lightning_fp8.fp8_autocast(fp8_recipe=made):
            _of_layer(layer, rows, STEPS_BEFORE)
        optimizer.step()
    with ExitStack() as stack:
        for surroundings in (a_card, cuda_sides_on_cpu) if on_a_card else ():
            stack.enter_context(surroundings())
        _forget_plans(layer)
        stack.enter_context(lightning_fp8.fp8_autocast(fp8_recipe=made))
        yield layer


def _of_block(fuse: bool | None, steps: int) -> tuple[float, float]:
    """Of a decoder layer in BF16, or if ``fuse`` is not None in FP8, with or without fused norms and MLPs."""
    import lightning_fp8

    transformers: Any = import_module("transformers")
    rows, width = BLOCK
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=rows,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16()
    block = model.model.layers[0]
    places = model.model.rotary_emb(torch.empty(1, rows, width, dtype=torch.bfloat16), torch.arange(rows)[None])
    run = partial(block, position_embeddings=places, attention_mask=None)
    with ExitStack() as stack:
        if fuse is not None:
            plugin = lightning_fp8.FP8FabricPrecision(fuse=fuse, first_last_layers_bf16=False)
            plugin.convert_module(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            for _ in range(3):  # see _of_ours
                with plugin.forward_context():
                    _of_layer(block, rows, STEPS_BEFORE, run, (1, rows, width))
                optimizer.step()
            for surroundings in a_card(), cuda_sides_on_cpu(), plugin.forward_context():
                stack.enter_context(surroundings)
            _forget_plans(block)
        return _of_layer(block, rows, steps, run, (1, rows, width))


def _forget_plans(module: nn.Module) -> None:
    """Layers keep plans by the kind of device, which the simulated GPU's tensors do not show."""
    for each in module.modules():
        if getattr(each, "_last_products", None):
            each._last_products = None  # type: ignore[assignment]


def _of_layer(
    layer: nn.Module,
    rows: int,
    steps: int,
    run: Callable[[Tensor], Tensor] | None = None,
    shape: tuple[int, ...] | None = None,
) -> tuple[float, float]:
    """Lower deciles in microseconds, of forward and of backward of ``run``, by default the layer."""
    shape = shape or (rows, next(layer.parameters()).shape[-1])
    run = run or layer
    x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(shape, dtype=torch.bfloat16)
    tensors: list[Tensor] = [x, *layer.parameters()]
    forward, backward = [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(steps):
            start = thread_time()
            y = run(x)
            middle = thread_time()
            y.backward(dy)
            end = thread_time()
            forward.append(middle - start)
            backward.append(end - middle)
            for tensor in tensors:
                tensor.grad = None
    finally:
        gc.enable()
    forward_decile, backward_decile = (sorted(each)[len(each) // 10] for each in (forward, backward))
    return 1e6 * forward_decile, 1e6 * backward_decile


# --- The simulated GPU ------------------------------------------------------------------------------------------------


@contextmanager
def a_card() -> Iterator[None]:
    """Treat CPU tensors as on a GPU whose driver launches nothing."""
    from cuda_kernels.host import gemm_selection, launch, tensor_maps

    driver = SimpleNamespace(cuLaunchKernel=lambda *args: (0,), cuMemsetD32Async=lambda *args: (0,))
    replaced: dict[str, Any] = {
        "is_cuda_device": lambda device: True,
        "_driver": lambda: driver,
        "_load": lambda kernel, index: 0,
        "enter_context": lambda index: None,
    }
    stream = patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True)
    backend = patch.dict(os.environ, {gemm_selection.CHOICE_VARIABLE: "numba"})
    maps = patch.multiple(tensor_maps, is_cuda_device=lambda device: True, _encoded=lambda tensor, box: bytes(128))
    with patch.multiple(launch, **replaced), maps, stream, backend:
        yield


@contextmanager
def cuda_sides_on_cpu() -> Iterator[None]:
    """Run the ops' CUDA implementations on CPU tensors, with new plans."""

    try:
        from lightning_fp8.ops import cast, plans
        from lightning_fp8.ops.op import Op
    except ImportError:
        clear, replaced = _in_older_states()
    else:
        ops = {each for module in _op_modules() for each in vars(module).values() if isinstance(each, Op)}
        replaced = [patch.dict(op.implementations, cpu=op.implementations["cuda"]) for op in ops]
        replaced += [patch.dict(op.plans, cpu=op.plans["cuda"]) for op in ops if op.plans]
        replaced.append(patch.object(cast, "gives_a_view", lambda *operand: False))  # a GPU's GEMMs read one order only
        clear = plans.clear_plan_cache
    with ExitStack() as stack:
        stack.callback(clear)
        for each in replaced:
            stack.enter_context(each)
        clear()
        yield


def _op_modules() -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.startswith("lightning_fp8.ops.")]


def _in_older_states() -> tuple[Callable[[], None], list[Any]]:
    """The same for versions before ``ops/op.py``: a function that clears plans, and the context managers."""
    from importlib import import_module

    calls = {
        each: dict(zip(each.__code__.co_freevars, each.__closure__))
        for module in _op_modules()
        for each in vars(module).values()
        if "on_cpu" in getattr(getattr(each, "__code__", None), "co_freevars", ())
    }

    @contextmanager
    def swapped(cell: Any, contents: Any) -> Iterator[None]:
        before, cell.cell_contents = cell.cell_contents, contents
        try:
            yield
        finally:
            cell.cell_contents = before

    replaced: list[Any] = [swapped(cells["on_cpu"], cells["on_cuda"].cell_contents) for cells in calls.values()]
    casting = import_module("lightning_fp8.ops.quantize.casting")
    replaced.append(patch.object(casting, "gives_a_view", lambda *operand: False))
    return import_module("lightning_fp8.ops.core.dispatch").clear_plan_cache, replaced


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--beside", type=Path, nargs="+", help="other checkouts, measured alternately with this one")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each version")
    parser.add_argument("--json", action="store_true", help="print the times as JSON")
    parser.add_argument("--write", type=Path, help="with --beside, also write a file of results")
    args = parser.parse_args()
    if args.json:
        print(json.dumps(layer_times(STEPS // 2, 1, on_the_cpu=False)))
        return
    if args.beside is None:
        print("the host's microseconds, forward and backward")
        for each in layer_times():
            print(f"{each.name:12} {list(each.shape)!s:10} {each.by:26} {_cells(each)}")
        return
    states = [Path(__file__).resolve().parents[2], *(each.resolve() for each in args.beside)]
    turns = []
    for done in range(1, args.rounds + 1):
        turns.append([_in_a_process(state) for state in states])
        of_states = [[_least(times) for times in zip(*of_state)] for of_state in zip(*turns)]
        if args.write:
            _write(args.write, dict(zip(states, of_states)), done)
    print(f"the host's microseconds, forward and backward: {', '.join(map(str, states))}, and the ratios to this one")
    for ours, *others in zip(*of_states, strict=True):
        ratios = [
            f"{ours.forward / each.forward:6.2f} {ours.backward / each.backward:6.2f}"  # type: ignore[operator]
            for each in others
            if not ours.note
        ]
        frames = [str(each.frames) for each in (ours, *others) if each.frames]
        print(f"{ours.name:12} {list(ours.shape)!s:10} {ours.by:26}", *map(_cells, (ours, *others)), *ratios, *frames)


def _write(path: Path, of_states: dict[Path, list[LayerTime]], rounds: int) -> None:
    """Write a file of results as ``python -m benchmarks --json`` does, whose notes name the versions."""
    from datetime import datetime, timezone

    from benchmarks.measuring import files, machine
    from benchmarks.measuring.record import Result

    rows = []
    for state, times in of_states.items():
        commit = subprocess.run(["git", "-C", state, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
        note = f"commit {commit[:8]}; simulated GPU, versions in turn, least of {rounds} processes; shared processors"
        for each in times:
            for index, (way, microseconds) in enumerate((("forward", each.forward), ("backward", each.backward))):
                result = Result(f"{each.name} {way}", each.by, each.shape, "bfloat16", host_microseconds=microseconds)
                frames = f"{each.frames[index]} Python frames of the package" if each.frames else None
                rows.append({**result.as_json(), "note": "; ".join(filter(None, (note, frames, each.note)))})
    document = {
        "what": "lightning_fp8: host time of layers, several versions in turn; see docs/benchmarks.md",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "commit": machine.commit(),
        "arguments": {"only": ["host"], "dry_run": False},
        "suites": {"host": rows},
        "errors": {},
    }
    files.write(document, path)


def _in_a_process(state: Path) -> list[LayerTime]:
    environment = {**os.environ, "PYTHONPATH": str(state)}
    command = [sys.executable, __file__, "--json"]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return [LayerTime(*each) for each in json.loads(output.splitlines()[-1])]


def _least(times: Sequence[LayerTime]) -> LayerTime:
    first = times[0]
    if first.note:
        return first
    return first._replace(
        forward=min(each.forward for each in times if each.forward),
        backward=min(each.backward for each in times if each.backward),
    )


def _cells(time: LayerTime) -> str:
    return time.note or f"{time.forward:7.1f} {time.backward:7.1f}"


if __name__ == "__main__":
    main()
