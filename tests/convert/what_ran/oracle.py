"""What a training step multiplied, op by op, and whether each product is right.

The oracle knows torch's ops and this package's schemas, and nothing of its modules or tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode

from tests.convert.what_ran.changes import ROWS

FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}
OPERANDS = {
    "aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1), "aten::baddbmm": (1, 2), "aten::_int_mm": (0, 1),
}  # fmt: skip
"""The positions of ``[(B,) M, K]`` and ``[(B,) K, N]``."""
UNKNOWN = re.compile(r"mm|matmul|linear|gem[mv]|mv\b|dot|conv(?!ert)|attention|einsum")
"""Names of ops that may multiply, too."""

FP8_ERROR = 0.1
"""Relative error, in the Frobenius norm, that FP8 may add."""


@dataclass
class Product:
    """One product ``[B, M, K] @ [B, K, N]``; ``right`` is ``[K, N]``, and ``modules`` those that were being called."""

    fp8: bool
    step: int
    in_region: bool
    backward: bool
    size: tuple[int, int, int, int]
    right: Tensor
    modules: tuple[nn.Module, ...]

    @property
    def flops(self) -> int:
        b, m, k, n = self.size
        return 2 * b * m * k * n


@dataclass
class Call:
    """A call of an ``nn.Linear``, with what it multiplied."""

    layer: nn.Linear
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    y: Tensor
    autocast: torch.dtype | None
    products: list[Product]


def relative_error(found: Tensor, right: Tensor) -> float:
    """In the Frobenius norm."""
    if found.shape != right.shape:
        return float("inf")
    return float((found.double() - right.double()).norm() / right.double().norm().clamp_min(1e-30))


def dequantized(codes: Tensor, scale_inv: Tensor, layout: str) -> Tensor:
    """``[R, K]`` in float64."""
    values = codes.float().double()
    if layout == "tensor":
        return values * scale_inv.double()
    if scale_inv.element_size() == 1:  # E8M0
        scale_inv = 2.0 ** (scale_inv.view(torch.uint8).double() - 127)
    rows, columns = (1, codes.shape[1]) if layout == "row" else map(int, layout.split("x"))
    scale_inv = scale_inv.double().repeat_interleave(rows, 0)[: codes.shape[0]]
    return values * scale_inv.repeat_interleave(columns, 1)[:, : codes.shape[1]]


@dataclass
class Oracle:
    """Records the ops inside :meth:`watching`; what is compared is kept, and compared when all has ended."""

    step: int = 0
    products: list[Product] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _compared: list[tuple[str, dict[str, Any], Any]] = field(default_factory=list)
    _called: list[tuple[nn.Module, int]] = field(default_factory=list)

    @contextmanager
    def watching(self, in_region: bool = True) -> Iterator[None]:
        before = modules.register_module_forward_pre_hook(lambda each, _: self._begin(each))
        after = modules.register_module_forward_hook(self._end, always_call=True)
        try:
            with _Mode(self, in_region):
                yield
        finally:
            before.remove()
            after.remove()
            self._called.clear()

    def _begin(self, module: nn.Module) -> None:
        self._called.append((module, len(self.products)))

    def _end(self, module: nn.Module, args: tuple[Any, ...], y: Any) -> None:
        _, first = self._called.pop()
        if isinstance(module, nn.Linear) and isinstance(y, Tensor):
            plain = type(module.weight) in (Tensor, nn.Parameter)
            weight = module.weight.detach().clone() if plain else None
            bias = None if module.bias is None else module.bias.detach().clone()
            autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
            x = args[0].detach().clone()
            self.calls.append(Call(module, x, weight, bias, y.detach().clone(), autocast, self.products[first:]))

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, in_region: bool) -> None:
        name = func._schema.name
        if name in OPERANDS:
            left, right = (args[place] for place in OPERANDS[name])
            return self._product(False, left.shape, right, in_region)
        named = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
        if name.startswith("bitsandbytes::") and {"A", "B"} <= named.keys() and UNKNOWN.search(name):
            a, (n, k) = named["A"], named.get("shapeB", named["B"].shape)
            return self._product(False, (a.numel() // k, k), a.new_empty(0, n), in_region)
        if not name.startswith("lightning_fp8::"):
            if UNKNOWN.search(name.partition("::")[2]):
                self.problems.append(f"oracle: it does not know {name}")
            return None
        if {"a", "b", "scale_a", "scale_b"} <= named.keys():
            a, b = named["a"], named["b"]
            if not {a.dtype, b.dtype} <= FLOAT8:
                self.problems.append(f"operands: {name} multiplied {a.dtype} and {b.dtype}")
            self._product(True, a.shape, b.t(), in_region)
            self._keep("product", {**named, "out": None}, result)
        elif "layout" in named and "x" in named and name.startswith("lightning_fp8::quantize"):
            self._keep("cast", named, result)
        elif not re.search("quantize|observe|update_scales|transpose|rms_norm|norm_backward", name):
            self.problems.append(f"oracle: it does not know {name}")
        return None

    def _product(self, fp8: bool, left: Any, right: Tensor, in_region: bool) -> None:
        batch = left[0] if len(left) == 3 else 1
        backward = torch._C._current_graph_task_id() >= 0
        called = tuple(each for each, _ in self._called)
        size = (batch, left[-2], left[-1], right.shape[-1])
        kept = right.detach().clone() if type(right) in (Tensor, nn.Parameter) else torch.empty(0)  # of a subclass
        self.products.append(Product(fp8, self.step, in_region, backward, size, kept, called))

    def _keep(self, what: str, named: dict[str, Any], result: Any) -> None:
        def kept(value: Any) -> Any:
            return value.detach().clone() if isinstance(value, Tensor) else value

        results = tuple(map(kept, result)) if isinstance(result, (tuple, list)) else kept(result)
        self._compared.append((what, {name: kept(value) for name, value in named.items()}, results))

    def verified(self) -> list[str]:
        """What is wrong with the numbers."""
        nothing = [] if self.products else ["oracle: it saw no product"]
        return [*self.problems, *nothing, *self._wrong_ops(), *self._wrong_calls()]

    def _wrong_ops(self) -> Iterator[str]:
        for what, named, result in self._compared:
            if what == "product" and result is not None:
                left = dequantized(named["a"], named["scale_a"], named["layout_a"])
                right = left @ dequantized(named["b"], named["scale_b"], named["layout_b"]).t()
                right = right if named.get("bias") is None else right + named["bias"].double()
                allowed = 1e-5 if result.dtype == torch.float32 else 1e-2
                if (error := relative_error(result, right)) > allowed:
                    yield f"product: {tuple(result.shape)} is off by {error:.2g} of its operands' product"
            elif what == "cast":
                for data, scale, x in ((*result[:2], named["x"]), (*result[2:4], named["x"].t())):
                    if not data.numel():
                        continue
                    scale = scale if scale.numel() else result[1]  # one scale for both copies
                    if data.shape != x.shape or (
                        (error := relative_error(dequantized(data, scale, named["layout"]), x)) > FP8_ERROR
                    ):
                        yield f"cast: {named['dtype']} {tuple(x.shape)} is off by {error:.2g}"

    def _wrong_calls(self) -> Iterator[str]:
        for call in self.calls:
            if call.weight is None or not call.products:
                continue
            if any(each.fp8 for each in call.products):
                bias = None if call.bias is None else call.bias.double()
                error = relative_error(call.y, F.linear(call.x.double(), call.weight.double(), bias))
                if error > FP8_ERROR:
                    yield f"layer: {tuple(call.weight.shape)} in FP8 is off by {error:.2g}"
            elif not torch.equal(call.y, _linear(call)):
                yield f"layer: {tuple(call.weight.shape)} in high precision has other bits than F.linear"

    def unlike(self, layer: nn.Module, plain: nn.Module) -> Iterator[str]:
        """What ``layer``, whose weight is quantized, computed that ``plain``, which has the same, does not."""
        for call in self.calls:
            if call.layer is not layer:
                continue
            if any(each.fp8 for each in call.products):
                yield f"quantized: {type(layer).__name__} of a {type(layer.weight.data).__name__} multiplied in FP8"
                continue
            with torch.no_grad(), _as_called(call):
                if call.bias is not None:
                    plain.bias.copy_(call.bias)  # type: ignore[union-attr, operator]
                y = plain(call.x)
            if not torch.equal(y, call.y):
                yield f"quantized: {type(layer).__name__} is off by {relative_error(call.y, y):.2g} of the plain one"


def _as_called(call: Call) -> Any:
    return nullcontext() if call.autocast is None else torch.autocast("cpu", dtype=call.autocast)


def _linear(call: Call) -> Tensor:
    with _as_called(call):
        return F.linear(call.x, call.weight, call.bias)  # type: ignore[arg-type]


class _Mode(TorchDispatchMode):
    def __init__(self, oracle: Oracle, in_region: bool) -> None:
        super().__init__()
        self.oracle, self.in_region = oracle, in_region

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.oracle.note(func, args, kwargs or {}, result, self.in_region)
        return result


def products_of(layer: nn.Linear, layers: list[nn.Linear], products: list[Product]) -> list[Product]:
    """The forward products of ``layer``, one of ``layers``: of those with its sizes it is the one that was being
    called, or else whose weight was multiplied."""
    k, n = layer.in_features, layer.out_features
    alike = [each for each in layers if (each.in_features, each.out_features) == (k, n)]
    of_size = [each for each in products if each.size == (1, ROWS, k, n) and not each.backward]
    return [each for each in of_size if _whose(each, alike) is layer]


def gradients_of(layer: nn.Linear, layers: list[nn.Linear], products: list[Product]) -> list[Product]:
    """The products of the gradient of the input of ``layer``; none if another one has its sizes."""
    k, n = layer.in_features, layer.out_features
    alike = [each for each in layers if (each.in_features, each.out_features) == (k, n)]
    return [each for each in products if each.size == (1, ROWS, n, k) and each.backward and len(alike) == 1]


def _whose(product: Product, alike: list[nn.Linear]) -> nn.Linear:
    called = [each for each in product.modules if any(each is other for other in alike)]
    if called or len(alike) == 1:
        return (called or alike)[-1]  # type: ignore[return-value]
    plain = [each for each in alike if each.weight.shape == product.right.t().shape]
    return min(plain or alike[-1:], key=lambda each: relative_error(product.right, each.weight.detach().t()))
