"""``lightning-fp8 kernels build``: compiles kernels on a machine without a GPU, for use on another machine.

    lightning-fp8 kernels build --arch 90a --linear 4096x14336 --tokens 8192 --recipe delayed --out kernels
    LIGHTNING_FP8_KERNELS=kernels python train.py

A training step of each layer runs on the CPU, and the kernels that a GPU would launch are recorded and compiled. Built
kernels do not need a compiler where they run. They are found by their source and architecture. ``built.json`` lists the
versions of the compilers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from cuda_kernels.host import cache_folder, compile_cache, launch
from cuda_kernels.host.gemm_selection import builds_of
from cuda_kernels.host.precompile import num_processors, process_pool
from cuda_kernels.kernel import ARCHITECTURES, Kernel
from lightning_fp8 import ops
from lightning_fp8.cli.bench import LayerGemm, bound_gemm, gemms_of, has_kernels
from lightning_fp8.cli.values import LINEAR, TOKENS, count, sizes
from lightning_fp8.doctor import probes
from lightning_fp8.fp8_region import fp8_autocast
from lightning_fp8.modules.linear import Linear
from lightning_fp8.modules.state import update_fp8_scales
from lightning_fp8.numerics.recipes import RECIPES, DelayedScaling, Recipe, make_recipe
from lightning_fp8.numerics.scaled import Role
from lightning_fp8.ops import activation, cast, norm, plans, scales
from lightning_fp8.ops.op import Op
from lightning_fp8.ops.transpose import transpose_op

MANIFEST = "built.json"
"""The file in a folder of built kernels that lists their names and architectures, and the versions of the compilers."""

_OPS = (
    cast.quantize_op,
    cast.quantize_columns_op,
    cast.observe_op,
    scales.update_scales_op,
    transpose_op,
    norm.norm_quantize_op,
    norm.norm_backward_op,
    norm.rms_norm_op,
    activation.activation_quantize_op,
    activation.activation_backward_quantize_op,
    activation.gated_quantize_op,
    activation.gated_backward_quantize_op,
)
"""The ops whose kernels are recorded. Kernels of GEMMs depend on the GPU, and are listed by their problems instead."""
_STEPS = 3
"""The number of training steps. With delayed scaling, there is no scale in the first step, and the host does not know
yet in the second that there is one."""


def _on_card_too(op: Op) -> Callable[..., Any]:
    """An implementation of an op on the CPU that also plans and binds the op's kernels."""
    on_cpu, on_cuda = op.implementations["cpu"], op.implementations["cuda"]

    def both(*args: Any) -> Any:
        on_cuda(*args)
        return on_cpu(*args)

    return both


@contextmanager
def noted() -> Iterator[dict[str, Kernel]]:
    """The kernels, by name, that ops with these CPU tensors would launch on a GPU. None is launched."""
    launched: dict[str, Kernel] = {}

    def note(kernel: Kernel, *started: object) -> None:
        launched[kernel.name] = kernel

    with ExitStack() as stack:
        stack.enter_context(launch.executing(note))
        # GEMMs on a GPU need contiguous rows.
        stack.enter_context(patch.object(cast, "gives_a_view", lambda *operand: False))
        for op in _OPS:
            stack.enter_context(patch.dict(op.implementations, cpu=_on_card_too(op)))
        plans.clear_plan_cache()
        stack.callback(plans.clear_plan_cache)
        yield launched


def kernels_of_layer(inputs: int, outputs: int, tokens: int, recipe: Recipe, arch: str) -> list[Kernel]:
    """All kernels that training a linear layer in bfloat16 may launch on a GPU of ``arch``: casts, and all products.

    The cases are weights in bfloat16 and float32, with and without bias, with and without ``main_grad``, inputs with
    and without gradient, and the gathering of FP8 weights from shards.
    """
    # Variants differ in the remainders of rows and columns, not in their numbers.
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
    options_of: list[tuple[LayerGemm, list[dict[str, Any]]]] = [
        (forward, [{}, {"bias_dtype": "bfloat16"}, {"bias_dtype": "float32"}]),
        (of_input, [{}]),
        (of_weight, [{}, {"out_dtype": "float32"}, {"out_dtype": "float32", "accumulate": True}]),
    ]
    for gemm, each in options_of:
        if has_kernels(gemm, recipe):
            problem = bound_gemm(gemm, recipe, torch.device("cpu")).problem
            for options in each:
                builds = builds_of(replace(problem, spec=replace(problem.spec, **options), architecture=arch))
                kernels += [function(*arguments) for function, arguments in builds]
    return kernels


def _start_kernels_of_shards(weight: Tensor, recipe: Recipe) -> None:
    """Call the additional ops for a sharded weight, which cast its shards and transpose its codes."""
    cast = recipe.cast(Role.WEIGHT)
    if cast.layout.has_one_scale_per_row:
        ops.transpose(ops.quantize_columns(weight, torch.ones(weight.shape[1]), cast.float8))
    elif cast.layout.transposes:
        ops.transpose(torch.zeros(weight.shape, dtype=cast.float8.dtype))


def build(find: Callable[..., Iterable[Kernel]], arguments: Sequence[Any], arch: str, folder: Path) -> dict[str, str]:
    """Compile the kernels of ``find(*arguments)`` for ``arch`` into ``folder``; returns errors by names of kernels.

    ``find`` must be a function of a module, because each process calls it and compiles a part of the kernels.
    """
    processors = num_processors()
    built: dict[str, str] = {}
    failed: dict[str, str] = {}
    with process_pool(processors) as pool:
        shares = (slice(index, None, processors) for index in range(processors))
        for more, less in pool.map(partial(_build_share, partial(find, *arguments), arch, folder), shares):
            built |= more
            failed |= less
    path, compilers = folder / MANIFEST, compile_cache.compilers()
    kernels = json.loads(path.read_text()) if path.exists() else {}
    kernels |= {key: {"name": name, "arch": arch, "compilers": compilers} for key, name in built.items()}
    cache_folder.write_whole(path, json.dumps(kernels, indent=1).encode())
    return failed


def _build_share(
    find: Callable[[], Iterable[Kernel]], arch: str, folder: Path, share: slice
) -> tuple[dict[str, str], dict[str, str]]:
    kernels = {kernel.name: kernel for kernel in find()}
    built, failed = {}, {}
    for name in sorted(kernels)[share]:
        key = compile_cache.source_key(kernels[name], "cubin", arch)
        try:
            cache_folder.write_code(folder / key, compile_cache.built(kernels[name], arch))
            built[key] = name
        except Exception as error:  # compilers may raise any error
            failed[name] = str(error)
    return built, failed


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
    """The kernels that ``lightning-fp8 doctor`` casts with. Its GEMM is cuBLASLt's unless a variable disables that."""
    with noted() as launched:
        for shape in probes.OPERANDS:
            probes.quantized(probes.values(*shape))
    return list(launched.values())


def main(argv: Sequence[str]) -> None:
    """``lightning-fp8 kernels``."""
    parser = argparse.ArgumentParser(
        prog="lightning-fp8 kernels", description="Compile kernels ahead of their first use."
    )
    command = parser.add_subparsers(required=True, metavar="build").add_parser(
        "build", help="compile a model's kernels to a folder for a machine with a GPU"
    )
    command.add_argument("--arch", choices=ARCHITECTURES, default="90a", help="GPU architecture; default: 90a, Hopper")
    command.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the kernels; existing ones are kept"
    )
    command.add_argument("--linear", type=sizes, action="append", required=True, metavar="INxOUT", help=LINEAR)
    command.add_argument("--tokens", type=count, default=8192, help=TOKENS)
    command.add_argument("--recipe", choices=sorted(RECIPES), action="append", help="may be repeated; default: delayed")
    args = parser.parse_args(argv)
    wanted = args.linear, args.tokens, args.recipe or ["delayed"], args.arch
    failed = build(layers_kernels, wanted, args.arch, args.out)
    for name, error in failed.items():
        print(f"not built: {name}: {error}")
    held = json.loads((args.out / MANIFEST).read_text())
    print(f"{args.out} holds {len(held)} kernels; {cache_folder.CARRIED_VARIABLE}={args.out} takes them from there")
    if failed:
        raise SystemExit(1)
