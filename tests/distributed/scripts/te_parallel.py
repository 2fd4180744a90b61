"""Run by two processes: modules that are cut by Transformer Engine's arguments, against those of one process.

``python -m tests.distributed.scripts.te_parallel FOLDER {few,all}``
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fp8 import (
    DotProductAttention,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    TransformerLayer,
    export_te_state_dict,
    fp8_autocast,
    fp8_state_dict,
    load_te_state_dict,
)
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.te_checkpoints.tensor_parallel import gather_tensor_parallel
from tests.distributed.launch import leave
from tests.distributed.scripts.parallel_linear import Collectives

HIDDEN, FFN, HEADS, SEQUENCE, BATCH = 64, 128, 4, 32, 2
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "llama": {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "num_gqa_groups": 2},
    "fused": {"fuse_qkv_params": True, "qkv_weight_interleaved": False, "softmax_type": "learnable"},
    "grouped": {"fuse_qkv_params": True, "qk_norm_type": "RMSNorm", "activation": "geglu", "num_gqa_groups": 2},
    "post": {"apply_residual_connection_post_layernorm": True, "output_layernorm": True, "zero_centered_gamma": True},
    "decoder": {"layer_type": "decoder", "attn_input_format": "bshd"},
    "at once": {"parallel_attention_mlp": True, "qk_norm_type": "LayerNorm"},
}

ALL = [
    (layer, recipe, sequence)
    for layer, recipe, sequence in itertools.product(LAYERS, ("bf16", *RECIPES), (False, True))
    if layer in ("llama", "fused") or recipe in ("bf16", "delayed")
]
FEW = [("llama", "bf16", True), ("llama", "delayed", True), ("fused", "mxfp8", True), ("grouped", "bf16", False)]


def recipe_region(name: str) -> AbstractContextManager[Any]:
    return nullcontext() if name == "bf16" else fp8_autocast(fp8_recipe=name)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def piece(x: Tensor, cut: bool, dim: int = 0) -> Tensor:
    own = x.chunk(dist.get_world_size(), dim)[dist.get_rank()] if cut else x
    return own.detach().clone().contiguous()


def whole(x: Tensor, cut: bool, dim: int = 0) -> Tensor:
    if not cut:
        return x
    pieces = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, x.contiguous())
    return torch.cat(pieces, dim)


def error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def perturbed(model: nn.Module) -> nn.Module:
    """With other biases and norms than 0 and 1."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def trained(
    model: nn.Module, x: Tensor, dy: Tensor, region: Callable[[], AbstractContextManager[Any]], **call: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x = x.clone().requires_grad_()
    with region():
        y = model(x, **call)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def of_layer(name: str, recipe: str, sequence: bool) -> dict[str, Any]:
    """A TransformerLayer of two ranks beside that of one process: differences, and errors of both against float32."""
    options: dict[str, Any] = {**LAYERS[name], **NO_DROPOUT}
    decoder = options.get("layer_type") == "decoder"
    torch.manual_seed(0)
    one = TransformerLayer(HIDDEN, FFN, HEADS, params_dtype=torch.bfloat16, **options)
    torch.manual_seed(0)
    parallel: Any = {"tp_group": dist.group.WORLD, "sequence_parallel": sequence, "set_parallel_mode": True}
    two = TransformerLayer(HIDDEN, FFN, HEADS, params_dtype=torch.bfloat16, **options, **parallel)
    mine, its = gather_tensor_parallel(two), one.state_dict()
    found: dict[str, Any] = {
        "begins": mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in its)
    }
    two.load_state_dict(perturbed(one).state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), 1e-3) for model in (one, two)]
    shape = (BATCH, SEQUENCE, HIDDEN) if decoder else (SEQUENCE, BATCH, HIDDEN)
    steps = 2 if recipe == "delayed" else 1
    for step in range(steps):
        x, dy, encoded = (random(*shape, seed=10 * step + each) for each in range(3))
        more = [{"encoder_output": piece(encoded, cut)} if decoder else {} for cut in (False, sequence)]
        results = trained(one, x, dy, lambda: recipe_region(recipe), **more[0])
        own = trained(two, piece(x, sequence), piece(dy, sequence), lambda: recipe_region(recipe), **more[1])
        if step == steps - 1:
            exact = TransformerLayer(HIDDEN, FFN, HEADS, params_dtype=torch.float32, **options)
            exact.load_state_dict(one.state_dict())
            truth = trained(exact, x.float(), dy.float(), nullcontext, **{k: v.float() for k, v in more[0].items()})
            gathered = whole(own[0], sequence), whole(own[1], sequence), gather_tensor_parallel(two, own[2])
            found["names"] = gathered[2].keys() == results[2].keys() == truth[2].keys()
            found["y dx"] = [error(gathered[each], results[each]) for each in (0, 1)]
            found["gradients"] = {
                key: [
                    error(gathered[2][key], results[2][key]),
                    error(gathered[2][key], value),
                    error(results[2][key], value),
                ]
                for key, value in truth[2].items()
                if not key.endswith(("key_bias", "k_norm.bias"))  # 0: softmax takes no notice of them
            }
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        two.load_state_dict(one.state_dict())
    found["scales"] = fp8_state_dict(two)["scale"].tolist()
    back = TransformerLayer(HIDDEN, FFN, HEADS, params_dtype=torch.bfloat16, **options)
    back.load_state_dict(gather_tensor_parallel(two))
    found["back"] = all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), one.state_dict().values()))
    found["whole scales"] = fp8_state_dict(one)["scale"].tolist()
    return found


def traffic(recipe: str) -> dict[str, Any]:
    """What a layer with sequence parallelism sends in a step, and the norms' sums among it."""
    layer = TransformerLayer(
        HIDDEN, FFN, HEADS, **NO_DROPOUT, params_dtype=torch.bfloat16, bias=False, normalization="RMSNorm",
        tp_group=dist.group.WORLD, sequence_parallel=True, set_parallel_mode=True,
    )  # fmt: skip
    x, collectives = random(SEQUENCE // 2, BATCH, HIDDEN), Collectives()
    optimizer = torch.optim.SGD(layer.parameters(), 1e-3)
    for _ in range(2):  # the second step has scales
        collectives = Collectives()
        x.requires_grad_()
        with recipe_region(recipe), collectives:
            y = layer(x)
        with collectives:
            y.backward(torch.ones_like(y))
        optimizer.step()
    return {"bytes": collectives.bytes, "calls": collectives.calls}


def options() -> dict[str, Any]:
    return {"tp_group": dist.group.WORLD, "params_dtype": torch.bfloat16}


def results_of(
    make: Callable[..., nn.Module],
    recipe: str = "bf16",
    cut_x: int | None = None,
    cut_y: int | None = None,
    **region: Any,
) -> list[float]:
    """Errors of y, dx and all gradients of a module of two ranks against one process, ``make(parallel)`` of both."""
    torch.manual_seed(0)
    one = perturbed(make(params_dtype=torch.bfloat16))
    two = make(**options())
    two.load_state_dict(one.state_dict())
    x = random(SEQUENCE, BATCH, HIDDEN)
    with torch.no_grad():
        shape = one(x)
    shape = shape[0] if isinstance(shape, tuple) else shape
    dy = random(*shape.shape, seed=1)

    def run(model: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        def first(x: Tensor) -> Tensor:
            given = model(x)
            return sum_of(given) if isinstance(given, tuple) else given

        x = x.clone().requires_grad_()
        with nullcontext() if recipe == "bf16" else fp8_autocast(fp8_recipe=recipe, **region):
            y = first(x)
        y.backward(dy)
        assert x.grad is not None
        return y.detach(), x.grad, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    y, dx, gradients = run(one, x, dy)
    own = run(two, x if cut_x is None else piece(x, True, cut_x), dy if cut_y is None else piece(dy, True, cut_y))
    mine = gather_tensor_parallel(two, own[2])
    assert mine.keys() == gradients.keys()
    pairs = [(whole(own[0], cut_y is not None, cut_y or 0), y), (whole(own[1], cut_x is not None, cut_x or 0), dx)]
    return [error(a, b) for a, b in [*pairs, *((mine[key], gradients[key]) for key in gradients)]]


def sum_of(given: tuple[Any, ...]) -> Tensor:
    """Of y, and of a bias and a norm's output beside it, which those who ask for them add."""
    y = given[0]
    for each in given[1:]:
        y = y + each
    return y


def modules() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for recipe in ("bf16", "delayed"):
        for sequence in (False, True):
            cut = 0 if sequence else None

            def parallel(mode: str, sequence: bool = sequence) -> dict[str, Any]:
                return {"parallel_mode": mode, "sequence_parallel": sequence}

            def set_mode(sequence: bool = sequence) -> dict[str, Any]:
                return {"set_parallel_mode": True, "sequence_parallel": sequence}

            made: dict[str, tuple[Callable[..., nn.Module], int | None, int | None]] = {
                "column": (lambda **o: Linear(HIDDEN, 96, **parallel("column"), **o), cut, 2),
                "row": (lambda **o: Linear(HIDDEN, 96, **parallel("row"), **o), 2, cut),
                "row, bias returned": (
                    lambda **o: Linear(HIDDEN, 96, return_bias=True, **parallel("row"), **o), 2, cut),
                "column, bias returned": (
                    lambda **o: Linear(HIDDEN, 96, return_bias=True, **parallel("column"), **o), cut, 2),
                "normed": (lambda **o: LayerNormLinear(HIDDEN, 96, **parallel("column"), **o), cut, 2),
                "mlp": (
                    lambda **o: LayerNormMLP(
                        HIDDEN, FFN, return_bias=True, return_layernorm_output=True, **set_mode(), **o), cut, cut),
                "recomputed mlp": (
                    lambda **o: LayerNormMLP(
                        HIDDEN, FFN, activation="swiglu", checkpoint=True, normalization="RMSNorm", **set_mode(), **o),
                    cut, cut),
                "attention": (
                    lambda **o: MultiheadAttention(
                        HIDDEN, HEADS, attention_dropout=0.0, return_bias=True, input_layernorm=True,
                        return_layernorm_output=True, fuse_qkv_params=True, **set_mode(), **o), cut, cut),
            }  # fmt: skip
            for name, (make, cut_x, cut_y) in made.items():
                found[f"{name} {recipe} {sequence}"] = results_of(make, recipe, cut_x, cut_y)
    return found


def behaviour() -> dict[str, Any]:
    """Micro-batches, main_grad, calibration, meta, copies, torch.compile, later groups and second derivatives."""
    found: dict[str, Any] = {}
    group = dist.group.WORLD
    make: dict[str, Callable[..., nn.Module]] = {
        "column": lambda **o: Linear(HIDDEN, 96, parallel_mode="column", **o),
        "row": lambda **o: Linear(HIDDEN * 2, 96, parallel_mode="row", **o),
        "normed": lambda **o: LayerNormLinear(HIDDEN, 96, parallel_mode="column", **o),
        "mlp": lambda **o: LayerNormMLP(HIDDEN, FFN, set_parallel_mode=True, **o),
    }
    x = random(SEQUENCE // 2, BATCH, HIDDEN, seed=dist.get_rank()).float()
    for name, of in make.items():
        torch.manual_seed(0)
        layer = of(tp_group=group, sequence_parallel=name != "row", fuse_wgrad_accumulation=True)
        torch.manual_seed(0)
        plain = of(tp_group=group, sequence_parallel=name != "row")
        weights = [(getattr(layer, each), getattr(plain, each)) for each in layer.weight_names]
        for region in (nullcontext, lambda: fp8_autocast(fp8_recipe="delayed")):
            for weight, _ in weights:
                weight.main_grad = torch.full(weight.shape, 5.0)
            plain.zero_grad()
            for first in (True, False):
                with region():
                    y, its = layer(x, first), plain(x, first)
                y.square().sum().backward()
                its.square().sum().backward()
            for weight, its_weight in weights:
                assert weight.grad is None
                torch.testing.assert_close(weight.main_grad, its_weight.grad, rtol=2e-2, atol=2e-2)

        watched = of(tp_group=group, sequence_parallel=name != "row")
        with fp8_autocast(enabled=False, calibrating=True):
            y = watched(x)
        y.sum().backward()
        state = fp8_state_dict(watched)
        found[f"{name} observed"] = dict(zip(state["names"], (state["seen"] + state["scale"] > 0).tolist()))

        with torch.device("meta"):
            late = of(tp_group=group, sequence_parallel=name != "row")
        late.to_empty(device="cpu")
        torch.manual_seed(1)
        late.reset_parameters()
        one = of()
        torch.manual_seed(1)
        one.reset_parameters()
        filled = gather_tensor_parallel(late)
        found[f"{name} reset"] = all(torch.equal(filled[key], value) for key, value in one.state_dict().items())
        weight = getattr(late, late.weight_names[0])
        found[f"{name} attributes"] = [weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride]
        marks = [getattr(parameter, "sequence_parallel", None) for parameter in late.parameters()]
        found[f"{name} marked"] = [mark for mark in marks if mark is not None]

        copied, unpickled = copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))
        unpickled.set_tensor_parallel_group(group)
        compiled = torch.compile(copy.deepcopy(plain), backend="aot_eager")
        results = []
        for each in (plain, copied, unpickled, compiled):
            each.zero_grad()
            with fp8_autocast(fp8_recipe="tensorwise"):
                y = each(x)
            y.square().sum().backward()
            results.append([y.detach(), *(parameter.grad for parameter in each.parameters())])
        found[f"{name} copies"] = [all(torch.equal(a, b) for a, b in zip(result, results[0])) for result in results[1:]]

        given = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(plain(given).square().sum(), given, create_graph=True)
        dx.square().sum().backward()
        found[f"{name} second"] = bool(given.grad.isfinite().all() and given.grad.any())  # type: ignore[union-attr]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        without = TransformerLayer(HIDDEN, FFN, HEADS, tp_size=2, sequence_parallel=True, set_parallel_mode=True)
        with_tracker = Linear(8, 8, tp_size=2, parallel_mode="row", get_rng_state_tracker=Tracker)
    found["warned"] = [str(each.message) for each in caught if "tp_group" in str(each.message)]
    found["tracked"] = float(with_tracker.weight.detach().sum())
    cut: dict[str, Any] = {"tp_group": group}
    sequence: dict[str, Any] = {**cut, "sequence_parallel": True}
    column, row, layers = {"parallel_mode": "column"}, {"parallel_mode": "row"}, {"set_parallel_mode": True}
    its = TransformerLayer(HIDDEN, FFN, HEADS).state_dict()
    found["errors"] = {
        "no group": said(RuntimeError, lambda: without(x)),
        "no group to load": said(RuntimeError, lambda: without.load_state_dict(its)),
        "features": said(ValueError, lambda: Linear(97, 32, **row, **cut)),
        "heads": said(ValueError, lambda: MultiheadAttention(63, 3, **layers, **cut)),
        "ffn": said(ValueError, lambda: LayerNormMLP(32, 33, **layers, **cut)),
        "parts": said(ValueError, lambda: Linear(32, 32, parameters_split={"a": 3, "b": 29}, **column, **cut)),
        "size": said(ValueError, lambda: Linear(32, 32, tp_size=4, **cut)),
        "sequence alone": said(ValueError, lambda: Linear(32, 32, **sequence)),
        "no set_parallel_mode": said(ValueError, lambda: TransformerLayer(32, 64, 4, **sequence)),
        "row of a norm": said(ValueError, lambda: LayerNormLinear(32, 32, **row, **cut)),
        "drop path": said(ValueError, lambda: TransformerLayer(32, 64, 4, drop_path_rate=0.1, **layers, **sequence)),
        "rows": said(ValueError, lambda: Linear(HIDDEN, 32, **row, **sequence)(torch.zeros(3, 2, HIDDEN // 2))),
        "norm": said(RuntimeError, lambda: RMSNorm(8, sequence_parallel=True)(torch.zeros(2, 8))),
    }
    without.set_tensor_parallel_group(group)
    without.load_state_dict(TransformerLayer(HIDDEN, FFN, HEADS).state_dict())
    assert without(x).shape == x.shape

    found["loads"] = []
    saved = TransformerLayer(HIDDEN, FFN, HEADS, fuse_qkv_params=True, activation="geglu", softmax_type="learnable")
    for fused in (True, False):
        loaded = TransformerLayer(
            HIDDEN, FFN, HEADS, fuse_qkv_params=fused, activation="geglu", softmax_type="learnable", **layers, **cut
        )
        load_te_state_dict(loaded, export_te_state_dict(saved, "1.13"))
        again = copy.deepcopy(saved)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        load_te_state_dict(again, gather_tensor_parallel(loaded))
        found["loads"].append(all(map(torch.equal, again.state_dict().values(), saved.state_dict().values())))

    single = dist.new_group([0]), dist.new_group([1])
    own = single[dist.get_rank()]
    alone = TransformerLayer(
        HIDDEN, FFN, HEADS, tp_group=own, sequence_parallel=True, set_parallel_mode=True, **NO_DROPOUT
    )
    found["alone"] = [alone.layernorm_mlp.parallel_mode, [*alone.layernorm_mlp.cuts]]
    whole_layer = Linear(8, 6, tp_group=group)
    found["not cut"] = list(whole_layer.weight.shape)

    normed = LayerNormLinear(
        HIDDEN, 96, parallel_mode="column", tp_group=group, sequence_parallel=True,
        return_layernorm_output=True, return_layernorm_output_gathered=True,
    )  # fmt: skip
    uncut = LayerNormLinear(HIDDEN, 96, return_layernorm_output=True)
    uncut.load_state_dict(gather_tensor_parallel(normed))
    given, both = x.clone().requires_grad_(), whole(x, True).requires_grad_()
    y, norm = normed(given)
    its_y, its_norm = uncut(both)
    (y.square().sum() + norm.square().sum() / 2).backward()  # each rank has its share of the whole's gradient
    (its_y.square().sum() + its_norm.square().sum()).backward()
    found["gathered norm"] = [error(norm.detach(), its_norm.detach()), error(given.grad, piece(both.grad, True))]  # type: ignore[arg-type]

    slopes = []
    for parallel in ({}, cut):
        attention = DotProductAttention(4, 16, attn_mask_type="no_mask", **parallel)
        heads = [piece(random(8, 1, 4, 16, seed=each).float(), bool(parallel), 2) for each in range(3)]
        slopes.append(whole(attention(*heads, core_attention_bias_type="alibi"), bool(parallel), 2))
    found["alibi"] = error(slopes[1], slopes[0])

    norm = RMSNorm(HIDDEN, sequence_parallel=True)
    norm.set_tensor_parallel_group(group)
    norm(x).square().sum().backward()
    its_norm = RMSNorm(HIDDEN)
    its_norm(whole(x, True)).square().sum().backward()
    found["norm"] = error(norm.weight.grad, its_norm.weight.grad)
    return found


class Tracker:
    """As Megatron's: another state for each rank."""

    @contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(dist.get_rank())
            yield


def said(error: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except error as raised:
        return str(raised)
    return ""


if __name__ == "__main__":
    dist.init_process_group("gloo")
    report: dict[str, Any] = {"traffic": {recipe: traffic(recipe) for recipe in ("bf16", *RECIPES)}}
    if sys.argv[2] == "few":
        report |= {"modules": modules(), "behaviour": behaviour()}
    for name, recipe, sequence in FEW if sys.argv[2] == "few" else ALL:
        report[f"{name} {recipe} {sequence}"] = of_layer(name, recipe, sequence)
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(report))
    leave()
