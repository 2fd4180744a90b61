"""``lightning-fp8 kernels build``: kernels compiled where no card is, to be carried to one.

    lightning-fp8 kernels build --arch 90a --linear 4096x14336 --tokens 8192 --recipe delayed --out kernels
    LIGHTNING_FP8_KERNELS=kernels python train.py

A training step of each layer runs on the CPU, and what a card would start is noted and compiled. Built kernels need no
compiler where they run: they are found by their source and architecture. ``built.json`` says what made them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cuda_kernels.host import cache_folder, compile_cache, launch
from cuda_kernels.host.gemm_selection import builds_of
from cuda_kernels.host.precompile import num_processors, process_pool
from cuda_kernels.kernel import ARCHITECTURES, Kernel
from lightning_fp8 import doctor, ops
from lightning_fp8.cli.bench import LayerGemm, bound_gemm, count, gemms_of, has_kernels, sizes
from lightning_fp8.fp8_region import fp8_autocast
from lightning_fp8.modules.linear import Linear
from lightning_fp8.modules.state import update_fp8_scales
from lightning_fp8.ops import activation, cast, norm, plans, scales
from lightning_fp8.ops.op import Op
from lightning_fp8.ops.transpose import transpose_op
from lightning_fp8.recipes import RECIPES, DelayedScaling, Recipe, make_recipe
from lightning_fp8.scaled import Role

MANIFEST = "built.json"
"""The file in a folder of built kernels that lists each one's name and architecture, and the compilers that made it."""

_OPS = (
    cast.quantize_op,
    cast.quantize_columns_op,
    cast.observe_op,
    scales.update_scales_op,
    transpose_op,
    norm.norm_quantize_op,
    norm.norm_backward_op,
    activation.activation_quantize_op,
    activation.activation_backward_quantize_op,
    activation.gated_quantize_op,
    activation.gated_backward_quantize_op,
)
"""The ops whose kernels are noted; those of GEMMs depend on the card, and are asked for by their problems."""
_STEPS = 3
"""Training steps: delayed scaling has no scale in the first, and the host does not know of it in the second."""


def _on_card_too(op: Op) -> Callable[..., Any]:
    """What computes an op on the CPU, planned and started as on a card, too."""
    on_cpu, on_cuda = op.implementations["cpu"], op.implementations["cuda"]

    def both(*args: Any) -> Any:
        on_cuda(*args)
        return on_cpu(*args)

    return both


@contextmanager
def noted() -> Iterator[dict[str, Kernel]]:
    """The kernels, by name, that ops called with CPU tensors would start on a card; none runs."""
    launched: dict[str, Kernel] = {}

    def note(kernel: Kernel, *started: object) -> None:
        launched[kernel.name] = kernel

    executors, gives_a_view = dict(launch.EXECUTORS), cast.gives_a_view
    on_cpu = {op: op.implementations["cpu"] for op in _OPS}
    launch.EXECUTORS["cpu"] = note
    cast.gives_a_view = lambda *operand: False  # a GPU's GEMMs read one order only
    for op in _OPS:
        op.implementations["cpu"] = _on_card_too(op)
    plans.clear_plan_cache()
    try:
        yield launched
    finally:
        launch.EXECUTORS.clear()
        launch.EXECUTORS.update(executors)
        cast.gives_a_view = gives_a_view
        for op, implementation in on_cpu.items():
            op.implementations["cpu"] = implementation
        plans.clear_plan_cache()


def kernels_of_layer(inputs: int, outputs: int, tokens: int, recipe: Recipe, arch: str) -> list[Kernel]:
    """All that training a linear layer in bfloat16 may start on a card of ``arch``: casts, every plan of its products.

    With weights in bfloat16 or float32, with a bias and without, and with its weight's gradient added to a main_grad;
    with an input that needs a gradient, and with one that needs none; and what makes a weight's FP8 operands of those
    of its shards.
    """
    # Variants differ in how rows and columns end, not in how many there are.
    rows, k, n = (128 + size % 128 for size in (tokens, inputs, outputs))
    with noted() as launched:
        for weights, needs_gradient in product((torch.bfloat16, torch.float32), (True, False)):
            layer = Linear(k, n, params_dtype=weights)
            for _ in range(_STEPS):
                x = torch.randn(rows, k, dtype=torch.bfloat16, requires_grad=needs_gradient)
                with fp8_autocast(fp8_recipe=recipe), torch.autocast("cpu", torch.bfloat16):
                    y = layer(x)
                y.backward(torch.randn_like(y))
                if isinstance(recipe, DelayedScaling):
                    update_fp8_scales(layer)
            _start_kernels_of_shards(layer.weight.detach(), recipe)
    kernels = [kernel for kernel in launched.values() if arch in kernel.architectures]
    forward, of_input, of_weight = gemms_of(inputs, outputs, tokens)
    asked: tuple[tuple[LayerGemm, dict[str, Any]], ...] = (
        (forward, {}),
        (forward, {"bias_dtype": "bfloat16"}),
        (forward, {"bias_dtype": "float32"}),
        (of_input, {}),
        (of_weight, {}),
        (of_weight, {"out_dtype": "float32"}),
        (of_weight, {"out_dtype": "float32", "accumulate": True}),
    )
    for gemm, options in asked:
        if not has_kernels(gemm, recipe):  # it is multiplied in BF16
            continue
        problem = bound_gemm(gemm, recipe, torch.device("cpu")).problem
        spec = replace(problem.spec, **options)
        # Two multiprocessors are enough to share what they load.
        builds = builds_of(replace(problem, spec=spec, architecture=arch, multiprocessors=2))
        kernels += [function(*arguments) for function, arguments in builds]
    return kernels


def _start_kernels_of_shards(weight: Tensor, recipe: Recipe) -> None:
    """Call the ops that cast the shards of a weight, beside those of the whole weight, and transpose its codes."""
    cast = recipe.cast(Role.WEIGHT)
    if cast.layout.has_one_scale_per_row:
        ops.transpose(ops.quantize_columns(weight, torch.ones(weight.shape[1]), cast.float8))
    elif cast.layout.transposes:
        ops.transpose(torch.zeros(weight.shape, dtype=cast.float8.dtype))


def build(find: Callable[..., Iterable[Kernel]], arguments: Sequence[Any], arch: str, folder: Path) -> dict[str, str]:
    """Compile the kernels that ``find(*arguments)`` gives for ``arch`` into ``folder``, on all processors.

    ``find``: a function that a module has; each process calls it and compiles its share.

    Returns:
        What failed, by the kernel's name.
    """
    processors = num_processors()
    shares = [(find, arguments, arch, folder, index, processors) for index in range(processors)]
    built: dict[str, str] = {}
    failed: dict[str, str] = {}
    with process_pool(processors) as pool:
        for more, less in pool.map(_build_share, *zip(*shares)):
            built |= more
            failed |= less
    _write_manifest(folder, arch, built)
    return failed


def _build_share(
    find: Callable[..., Iterable[Kernel]],
    arguments: Sequence[Any],
    arch: str,
    folder: Path,
    share: int,
    num_shares: int,
) -> tuple[dict[str, str], dict[str, str]]:
    kernels = {kernel.name: kernel for kernel in find(*arguments)}
    built = {}
    failed = {}
    for name in sorted(kernels)[share::num_shares]:
        key = compile_cache.source_key(kernels[name], "cubin", arch)
        try:
            cache_folder.carry(folder, key, compile_cache.built(kernels[name], arch))
            built[key] = name
        except Exception as error:  # what a compiler raises is no business of ours
            failed[name] = str(error)
    return built, failed


def _write_manifest(folder: Path, arch: str, built: dict[str, str]) -> None:
    path = folder / MANIFEST
    compilers = compile_cache.compilers()
    kernels = json.loads(path.read_text()) if path.exists() else {}
    kernels |= {key: {"name": name, "arch": arch, "compilers": compilers} for key, name in built.items()}
    cache_folder.write_whole(path, json.dumps(kernels, indent=1).encode())


def layers_kernels(layers: Sequence[tuple[int, int]], tokens: int, recipes: Sequence[str], arch: str) -> list[Kernel]:
    """The kernels of all layers under all recipes, and the doctor's."""
    of_layers = [
        kernel
        for inputs, outputs in layers
        for recipe in recipes
        for kernel in kernels_of_layer(inputs, outputs, tokens, make_recipe(recipe), arch)
    ]
    return of_layers + doctors_kernels()


def doctors_kernels() -> list[Kernel]:
    """The kernels that ``lightning-fp8 doctor`` casts with; its GEMM is cuBLASLt's wherever that is not forbidden."""
    with noted() as launched:
        for shape in doctor.OPERANDS:
            doctor.quantized(doctor.values(*shape))
    return list(launched.values())


def main(argv: Sequence[str]) -> None:
    """``lightning-fp8 kernels``."""
    args = _parser().parse_args(argv)
    failed = build(
        layers_kernels, (args.linear, args.tokens, args.recipe or ["delayed"], args.arch), args.arch, args.out
    )
    for name, error in failed.items():
        print(f"not built: {name}: {error}")
    held = json.loads((args.out / MANIFEST).read_text())
    print(f"{args.out} holds {len(held)} kernels; {cache_folder.CARRIED_VARIABLE}={args.out} takes them from there")
    if failed:
        raise SystemExit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-fp8 kernels", description="Compile kernels ahead of their first use."
    )
    command = parser.add_subparsers(required=True, metavar="build").add_parser(
        "build", help="compile a model's kernels into a folder that can be carried to a card"
    )
    command.add_argument("--arch", choices=ARCHITECTURES, default="90a", help="of the card: sm_90a is Hopper's")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the kernels; what is there stays")
    command.add_argument("--linear", type=sizes, action="append", required=True, metavar="INxOUT", help="of a layer")
    command.add_argument("--tokens", type=count, default=8192, help="rows of its input: batch size times length")
    command.add_argument("--recipe", choices=sorted(RECIPES), action="append", help="one or several; delayed")
    return parser
