"""The error of FP8 attention: output and gradients against float64, compared with that of rounding the inputs only.

    python -m benchmarks.attention_numerics --json out.json             # includes training a small GPT: ten minutes
    python -m benchmarks.attention_numerics --data gauss,sink           # synthetic tensors only: a minute
    python -m benchmarks.attention_numerics --masks causal,full         # also without a mask
    python -m benchmarks.attention_numerics --data "late keys,value offset"     # known limits
    python -m benchmarks.attention_numerics --trained layers.pt         # save the training's tensors and reuse them

CPU only. An error is ``|x - exact| / |exact|`` (Frobenius) of a head, root mean square over heads and layers, in
percent. ``inputs alone`` is exact attention of the rounded inputs, a lower bound for every scheme that casts them. The
exit status is 1 if FP8's error exceeds 1.35 times that (1.7 with the sink; the known limits have no bound). For ``late
keys`` under a causal mask, only the rows and keys before the late ones are measured.

Alternatives are measured too: keys with their mean, keys without the mean of all of them (the default with a causal
mask is the mean of the first 128), O saved for the backward pass in E4M3, scaled by head and 128 rows like Q, and
running scales that start without headroom. ``changes``: the part of tiles of 64 queries in which a warp with 16 keys
changes a running scale, of Pᵀ and of dSᵀ, with and without headroom.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders import attention_data
from benchmarks.contenders.attention_data import DRAWN, LATE, LIMITS, Inputs
from benchmarks.measuring import machine
from benchmarks.measuring.files import write
from lightning_fp8.attention.ops import Band, Codes, backward, cast, casts, forward, reference, rows_of_mean

NAMES = ("O", "dQ", "dK", "dV")
GPT = ("gpt middle", "gpt end")
MASKS = {"causal": Band(right=0), "full": Band()}
ALL_ROWS = slice(None)
WARP = 16
"""Keys of a warp."""
INPUTS, OURS = "inputs alone", "FP8"

Outcome = tuple[Tensor, ...]
"""O, dQ, dK, dV."""


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: str) -> Outcome:
    """Attention and its gradients in float64, head by head: the scores of a long sequence take a gigabyte."""
    by_head = zip(*(x.double().flatten(0, 1) for x in (q, k, v, do)))
    heads = [_exact_head(*head, mask=mask) for head in by_head]
    return tuple(torch.stack(tensors).view(q.shape) for tensors in zip(*heads))


def _exact_head(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, mask: str) -> Outcome:
    scale = q.shape[-1] ** -0.5
    p = (q @ k.mT).mul_(scale)
    if mask == "causal":
        p.masked_fill_(torch.ones(p.shape, dtype=torch.bool).triu_(1), -math.inf)
    p = p.softmax(-1)
    o, dv = p @ v, p.mT @ do
    ds = p.mul_(do @ v.mT - (do * o).sum(-1, keepdim=True))
    return o, ds @ k * scale, ds.mT @ q * scale, dv


def by_default(k: Tensor, mask: str) -> Codes:
    """Cast keys as ``DotProductAttention`` does."""
    return cast(k, centered=True, mean_rows=rows_of_mean(MASKS[mask]))


def without_mean_of_all(k: Tensor, mask: str) -> Codes:
    return cast(k, centered=True)


def as_they_are(k: Tensor, mask: str) -> Codes:
    return cast(k)


CastKeys = Callable[[Tensor, str], Codes]


def rounded_inputs(q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: str, keys: CastKeys = by_default) -> Outcome:
    codes = cast(q), keys(k, mask), cast(v), cast(do)
    q, k, v, do = (x.dequantize() for x in codes)
    return exact(q, k, v, do, mask)


def fp8(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: str, keys: CastKeys = by_default, o_kept_in_fp8: bool = False
) -> Outcome:
    operands, scale, band = (cast(q), keys(k, mask), cast(v)), q.shape[-1] ** -0.5, MASKS[mask]
    o, m, l = forward(*operands, scale, band, dtype=torch.float32)  # noqa: E741
    kept = cast(o).dequantize() if o_kept_in_fp8 else o
    return o, *backward(cast(do), *operands, kept, m, l, scale, band, dtype=torch.float32)


def bf16(q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: str) -> Outcome:
    """torch's flash attention."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal")
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do)


def without_headroom(*layer_and_mask: Any) -> Outcome:
    with patch.object(casts, "HEADROOM", 1.0):
        return fp8(*layer_and_mask)


def changes(layers: Iterable[Inputs], mask: str, scheme: Callable[..., Outcome]) -> dict[str, float]:
    """How often a warp of the kernel for dK and dV changes a scale: its 16 keys have one vote for each 64 queries."""
    found: list[Tensor] = []

    def counted(x: Tensor, fitted: Tensor) -> tuple[Tensor, Tensor]:
        before = fitted.clone()
        rounded = casts.round_rows_running(x, fitted)
        changed = F.pad((fitted != before)[..., 0], (0, -fitted.shape[-2] % WARP))
        found.append(changed.unflatten(-1, (-1, WARP)).any(-1).flatten())
        return rounded

    with patch.object(reference, "round_rows_running", counted):
        for layer in layers:
            scheme(*layer, mask)
    return {name: round(torch.cat(found[index::2]).float().mean().item(), 3) for index, name in enumerate(("P", "dS"))}


SCHEMES: dict[str, Callable[..., Outcome]] = {
    "BF16": bf16,
    INPUTS: rounded_inputs,
    OURS: fp8,
    "inputs alone, keys not centered": partial(rounded_inputs, keys=as_they_are),
    "FP8, keys not centered": partial(fp8, keys=as_they_are),
    "FP8, keys without the mean of all": partial(fp8, keys=without_mean_of_all),
    "FP8, O kept in FP8": partial(fp8, o_kept_in_fp8=True),
    "FP8, scales without headroom": without_headroom,
}


def errors(
    scheme: Callable[..., Outcome],
    layers: Iterable[Inputs],
    truths: Iterable[Outcome],
    mask: str,
    rows: slice = ALL_ROWS,
) -> list[float]:
    """Relative errors of :data:`NAMES` in ``rows``; for dK and dV, rows are keys."""
    outcomes = (zip(scheme(*layer, mask), truth) for layer, truth in zip(layers, truths))
    squares = [
        torch.stack([_error_of_heads(x[:, :, rows], y[:, :, rows]).square() for x, y in outcome])
        for outcome in outcomes
    ]
    return torch.cat(squares, 1).mean(1).sqrt().tolist()


def _error_of_heads(x: Tensor, truth: Tensor) -> Tensor:
    difference = (x.double() - truth).flatten(0, 1).flatten(1).norm(dim=1)
    return difference / truth.flatten(0, 1).flatten(1).norm(dim=1)


def measure(name: str, layers: list[Inputs], mask: str = "causal") -> dict[str, Any]:
    """Errors of every scheme for one data set and mask, and the ratio of FP8's error to that of its inputs."""
    truths = [exact(*layer, mask) for layer in layers]
    rows = slice(-LATE) if (name, mask) == ("late keys", "causal") else ALL_ROWS
    found = {scheme: errors(function, layers, truths, mask, rows) for scheme, function in SCHEMES.items()}
    limit = None if name in LIMITS else 1.7 if name == "sink" else 1.35
    ratios = [ours / least for ours, least in zip(found[OURS], found[INPUTS])]
    percent = {scheme: {what: round(100 * e, 3) for what, e in zip(NAMES, row)} for scheme, row in found.items()}
    shape = [len(layers), *layers[0].q.shape]
    ratio = {what: round(value, 3) for what, value in zip(NAMES, ratios)}
    return {
        "data": name,
        "mask": mask,
        "shape": shape,
        "percent": percent,
        "ratio": ratio,
        "changes": {
            name: changes(layers, mask, scheme)
            for name, scheme in (("headroom 1", without_headroom), (f"headroom {casts.HEADROOM:g}", fp8))
        },
        "limit": limit,
        "met": limit is None or max(ratios) <= limit,
    }


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: percent of O, dQ, dK, dV."""
    lines = [
        f"| data | mask | {' | '.join(SCHEMES)} | FP8 / inputs alone |",
        "|---" * (len(SCHEMES) + 3) + "|",
    ]
    for result in results:
        cells = [" ".join(f"{value:.2f}" for value in result["percent"][scheme].values()) for scheme in SCHEMES]
        ratios = " ".join(map(str, result["ratio"].values()))
        lines.append(f"| {result['data']} | {result['mask']} | {' | '.join(cells)} | {ratios} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_numerics", description=__doc__.split("\n")[0])
    drawn = {**DRAWN, **LIMITS}
    known = (*drawn, *GPT)
    parser.add_argument("--data", default=",".join(known), help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--masks", default="causal", help=f"of {', '.join(MASKS)}; default: causal")
    parser.add_argument("--steps", type=int, default=500, help="of the GPT's training; default: 500")
    parser.add_argument("--trained", type=Path, help="file for the GPT's tensors: read if it exists, else written")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args(arguments)
    names = args.data.split(",")
    for name in names:
        if name not in known:
            parser.error(f"--data {name!r} is not one of {', '.join(known)}")
    masks = args.masks.split(",")
    for mask in masks:
        if mask not in MASKS:
            parser.error(f"--masks {mask!r} is not one of {', '.join(MASKS)}")
    layers = _trained(args.steps, args.trained) if set(names) & set(GPT) else {}
    results = []
    for name, mask in itertools.product(names, masks):
        results.append(measure(name, layers[name] if name in GPT else [drawn[name]()], mask))
        print(table(results[-1:]).splitlines()[-1], flush=True)
    print(f"\n{table(results)}")
    if args.json:
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        about = {"date": date, "commit": machine.commit(), "torch": torch.__version__, "steps": args.steps}
        write({"what": "errors of FP8 attention in percent", **about, "results": results}, args.json)
    return int(not all(result["met"] for result in results))


def _trained(steps: int, path: Path | None) -> dict[str, list[Inputs]]:
    if path is not None and path.exists():
        found = torch.load(path, weights_only=True)
        return {name: [Inputs(*layer) for layer in layers] for name, layers in found.items()}
    moments = attention_data.trained(steps, say=print)
    layers = dict(zip(GPT, moments.values()))
    if path is not None:
        torch.save({name: [tuple(layer) for layer in found] for name, found in layers.items()}, path)
    return layers


if __name__ == "__main__":
    sys.exit(main())
