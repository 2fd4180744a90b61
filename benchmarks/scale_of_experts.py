"""What one scale for all experts loses against one each, as their magnitudes differ: relative errors, on the CPU.

    python -m benchmarks.scale_of_experts --json benchmarks/results/DATE-cpu-scale-of-experts.json

Values are normally distributed, with outliers in one channel of the tokens. Magnitudes of tokens and gradients, or of
weights, decrease from the first expert to the last by a power of two. Errors are those of the last expert's results
against float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measuring.files import write
from lightning_fp8.numerics.formats import E4M3, E5M2, Float8
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops.cast import reference_quantize

WHAT = "errors of one scale for all experts; see docs/experts.md"
EXPERTS, ROWS, IN, OUT = 16, 128, 256, 256
SPREADS = 0, 4, 8, 10, 12
"""log2 of the first expert's magnitude over the last one's."""


def rows() -> Iterator[dict[str, object]]:
    """For each spread, the errors with one scale and with one each."""
    for spread in SPREADS:
        sizes = torch.exp2(-torch.linspace(0, spread, EXPERTS))[:, None, None]
        x, dy, w = (_normal(seed, *shape) for seed, shape in enumerate(((ROWS, IN), (ROWS, OUT), (OUT, IN))))
        x[:, :, 0] *= 10
        of_tokens = {"fprop": (x * sizes, w.mT), "wgrad": ((dy * sizes).mT, x * sizes)}
        of_weights = {"fprop": (x, w.mT * sizes)}
        for of, products in (("tokens and gradients", of_tokens), ("weights", of_weights)):
            for name, (a, b) in products.items():
                first = E5M2 if name == "wgrad" else E4M3
                right = a[-1].double() @ b[-1].double()
                errors = {
                    way: float((_cast(a, first, each)[-1] @ _cast(b, E4M3, each)[-1] - right).norm() / right.norm())
                    for way, each in (("one scale", False), ("one each", True))
                }
                yield {"spread of": of, "log2": spread, "product": name} | {k: round(v, 4) for k, v in errors.items()}


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(EXPERTS, *shape, generator=torch.Generator().manual_seed(seed))


def _cast(x: Tensor, float8: Float8, each: bool) -> Tensor:
    """The values of the codes, in float64; a scale is that of ``tensorwise``."""
    cast = Cast(float8, Layout.TENSOR)
    parts = [reference_quantize(part.contiguous(), cast, None, None) for part in (x if each else [x.flatten(0, 1)])]
    return torch.cat([part[0].double() * part[1].double() for part in parts]).view(x.shape)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale_of_experts", description=WHAT)
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args(arguments)
    found = list(rows())
    for row in found:
        print(row)
    if args.json:
        conditions = f"{EXPERTS} experts of {ROWS} tokens, {IN} to {OUT} features; normally distributed, on the CPU"
        write({"what": WHAT, "conditions": conditions, "torch": torch.__version__, "rows": found}, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
