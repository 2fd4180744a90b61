"""``lightning-fp8 plan``: estimates communication and memory of a model on many GPUs, in BF16 and FP8.

    lightning-fp8 plan --params 8b --mesh 8x8 --recipe delayed
    lightning-fp8 plan --config config.json --mesh 16x1 --activation-checkpointing --json
    lightning-fp8 plan --table

The formulas and their assumptions are in :mod:`lightning_fp8.parallel.costs`. Nothing is measured. Neither torch nor
Lightning is imported.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_fp8.parallel.costs import (
    RECIPES,
    SHAPES,
    STATES,
    WEIGHT_BYTES,
    Setup,
    Shape,
    largest_of_table,
    memory,
    most_layers,
    shape_of_config,
    traffic,
)

GB = 1e9

SCALING = (
    ("8b", 8, 1, 1, 8192),
    ("8b", 64, 1, 1, 8192),
    ("70b", 8, 8, 1, 8192),
    ("70b", 32, 8, 1, 8192),
    ("70b", 128, 8, 1, 8192),
    ("405b", 128, 8, 1, 8192),
    ("405b", 512, 8, 1, 8192),
    ("405b", 2048, 8, 1, 8192),
    ("405b", 128, 8, 16, 131072),
)
"""The rows of the table: model, data-, tensor- and context-parallel ranks, and tokens of a sequence."""


def report(setup: Setup, limit: float) -> dict[str, Any]:
    """The figures of ``setup``, with its recipe and in BF16. ``limit`` is the memory of a GPU in bytes."""
    both = {"bf16": replace(setup, recipe=None), "fp8": setup}
    columns = {
        name: {
            "traffic": {row: each._asdict() for row, each in traffic(one).items()},
            "memory": memory(one),
            "fits": memory(one)["all"] <= limit,
            "most_layers": (most := most_layers(one, limit)),
            "most_parameters": replace(one.shape, layers=most).parameters if most else 0,
            "largest_of_table": largest_of_table(one, limit),
        }
        for name, one in both.items()
    }
    return {
        "setup": asdict(setup),
        "parameters": setup.shape.parameters,
        "cards": setup.cards,
        "limit": limit,
        **columns,
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """:func:`report` as text."""
    setup, bf16, fp8 = found["setup"], found["bf16"], found["fp8"]
    yield f"{found['parameters'] / GB:.2f} B parameters on {found['cards']} cards: data {setup['data']} x tensor " + (
        f"{setup['tensor']} x context {setup['context']}, recipe {setup['recipe']}. Computed, not measured."
    )
    yield f"\n{'each rank and optimizer step: GB sent (collectives)':52}{'BF16':>18}{'FP8':>18}{'ratio':>8}"
    for name, wide in bf16["traffic"].items():
        small = fp8["traffic"][name]
        if wide["collectives"] or small["collectives"]:
            sent = [f"{each['bytes'] / GB:.3f} ({each['collectives']})" for each in (wide, small)]
            yield f"  {name:50}{sent[0]:>18}{sent[1]:>18}{_ratio(small['bytes'], wide['bytes']):>8}"
    yield f"\n{'memory of each rank: GB':52}{'BF16':>18}{'FP8':>18}{'ratio':>8}"
    for name, size in bf16["memory"].items():
        small = fp8["memory"][name]
        yield f"  {name:50}{size / GB:>18.2f}{small / GB:>18.2f}{_ratio(small, size):>8}"
    yield f"\nIn {found['limit'] / GB:g} GB of each card, on this mesh and with this batch:"
    for name, each in (("BF16", bf16), ("FP8", fp8)):
        fits = "this model fits" if each["fits"] else "this model does not fit"
        deepest = f"{each['most_layers']} such blocks ({each['most_parameters'] / GB:.1f} B parameters)"
        largest = each["largest_of_table"] or "none"
        yield f"  {name}: {fits}; at most {deepest}; the largest of {', '.join(SHAPES)}: {largest}"


def table() -> Iterator[str]:
    """The rows of :data:`SCALING` in Markdown, with delayed scaling."""
    yield (
        "| cards | model | data x tensor x context | tokens of a sequence | GB sent, BF16 | GB sent, FP8 | ratio | "
        + ("collectives, BF16 | collectives, FP8 | memory, BF16 (GB) | memory, FP8 (GB) |")
    )
    yield "|---" * 11 + "|"
    for name, data, tensor, context, length in SCALING:
        fp8 = Setup(
            SHAPES[name],
            "delayed",
            data,
            tensor,
            context,
            sequence_length=length,
            checkpointing=True,
            fp8_attention=context > 1,
        )
        bf16 = replace(fp8, recipe=None)
        sent = [traffic(each)["all"] for each in (bf16, fp8)]
        held = [memory(each)["all"] for each in (bf16, fp8)]
        yield (
            f"| {fp8.cards:,} | {name} | {data} x {tensor} x {context} | {length:,} | {sent[0].bytes / GB:.1f} "
            f"| {sent[1].bytes / GB:.1f} | {sent[1].bytes / sent[0].bytes:.2f} | {sent[0].collectives:,} "
            f"| {sent[1].collectives:,} | {held[0] / GB:.1f} | {held[1] / GB:.1f} |"
        )


def _ratio(fp8: float, bf16: float) -> str:
    return f"{fp8 / bf16:.2f}" if bf16 else ""


def main(argv: Sequence[str]) -> None:
    """``lightning-fp8 plan``."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.table:
        print("\n".join(table()))
        return
    if args.params is None and args.config is None:
        parser.error(f"name a model: --params {{{','.join(SHAPES)}}}, or --config path/to/config.json")
    data, tensor = args.mesh
    try:
        setup = Setup(
            _shape_of_file(args.config) if args.config else SHAPES[args.params],
            args.recipe,
            data,
            tensor,
            args.context_parallel,
            sequence_parallel=args.sequence_parallel,
            micro_batch=args.micro_batch,
            sequence_length=args.sequence_length,
            accumulate=args.accumulate,
            weights_dtype=args.weights_dtype,
            optimizer=args.optimizer,
            checkpointing=args.activation_checkpointing,
            gather_again=args.gather_again,
            fused=args.fuse,
            fp8_attention=args.fp8_attention,
            bf16_blocks=args.bf16_blocks,
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    found = report(setup, args.memory * GB)
    print(json.dumps(found, indent=1) if args.json else "\n".join(lines(found)))


def _shape_of_file(path: str) -> Shape:
    try:
        config = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object; name a config.json of Hugging Face")
    return shape_of_config(config)


def mesh(text: str) -> tuple[int, int]:
    """Parse ``"8x8"``, the numbers of data- and tensor-parallel ranks."""
    data, _, tensor = text.partition("x")
    if not (data.isdigit() and tensor.isdigit() and int(data) and int(tensor)):
        raise argparse.ArgumentTypeError(f"{text!r} is not data x tensor ranks, as in 8x8")
    return int(data), int(tensor)


def positive(text: str) -> int:
    """Parse a number of at least 1."""
    if not (text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def gigabytes(text: str) -> float:
    """``"80"``: above 0."""
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GB above 0, as in 80")
    return size


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-fp8 plan",
        description="Estimate communication and memory of each rank, in BF16 and FP8. Nothing is measured.",
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--params", choices=list(SHAPES), help="a Llama-like model of this size")
    model.add_argument("--config", metavar="config.json", help="Hugging Face's config.json of a Llama-like model")
    model.add_argument("--table", action="store_true", help="print only the table of docs/scaling.md")
    parser.add_argument("--mesh", type=mesh, default=(8, 1), metavar="DPxTP", help="FSDP2 x tensor-parallel ranks")
    parser.add_argument("--context-parallel", type=positive, default=1, metavar="N", help="ranks of a sequence")
    parser.add_argument("--recipe", choices=RECIPES, default="delayed")
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--sequence-parallel", action=flag, default=True, help="where ranks are tensor-parallel")
    parser.add_argument("--gather-again", action=flag, default=False, help="inputs, for the weights' gradients")
    parser.add_argument("--activation-checkpointing", action=flag, default=False, help="recompute each block")
    parser.add_argument("--fuse", action=flag, default=False, help="the MLP keeps only its first product in FP8")
    parser.add_argument("--fp8-attention", action=flag, default=False, help="keys and values travel as FP8 codes")
    parser.add_argument("--micro-batch", type=positive, default=1, help="sequences of a data-parallel rank")
    parser.add_argument("--sequence-length", type=positive, default=8192)
    parser.add_argument("--accumulate", type=positive, default=1, help="micro-batches of an optimizer step")
    parser.add_argument("--weights-dtype", choices=list(WEIGHT_BYTES), default="bfloat16", help="of sharded weights")
    parser.add_argument("--optimizer", choices=list(STATES), default="adamw")
    parser.add_argument("--bf16-blocks", type=int, default=2, help="that the recipe leaves in BF16 (default: 2)")
    parser.add_argument("--memory", type=gigabytes, default=80.0, metavar="GB", help="of a card (default: 80)")
    parser.add_argument("--json", action="store_true")
    return parser
