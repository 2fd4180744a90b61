"""torch's parallel styles with FP8 communication between FP8 layers; names, arguments and results are torch's.

| style | communicates in FP8 |
|---|---|
| :class:`ColwiseParallel` | an input that is sharded along its sequence |
| :class:`RowwiseParallel` | the gradient of an output that is sharded along its sequence |
| :class:`PrepareModuleInput` | an input that is gathered for several layers: cast once, gathered once |

Sums are communicated in the layers' dtype. torch's own styles support FP8 layers too, and communicate everything in
that dtype.
"""

from __future__ import annotations

import warnings
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import SequenceParallel

from lightning_fp8.arguments import is_dtensor
from lightning_fp8.functions.product import Product
from lightning_fp8.modules.linear_layer import LinearLayer, autocast_dtype
from lightning_fp8.numerics.recipes import DelayedScaling
from lightning_fp8.numerics.scaled import Role
from lightning_fp8.ops import Quantized
from lightning_fp8.parallel.collectives import require_shared_scales
from lightning_fp8.parallel.function import Parallel, gathered_forward, require_agreement
from lightning_fp8.weights.fp8_tensor import FP8Tensor, transposed

__all__ = [
    "ColwiseParallel",
    "Float8ColwiseParallel",
    "Float8RowwiseParallel",
    "PrepareFloat8ModuleInput",
    "PrepareModuleInput",
    "RowwiseParallel",
    "SequenceParallel",
]


class ColwiseParallel(torch_styles.ColwiseParallel):
    """torch's style; an FP8 layer gathers an input that is sharded along its sequence itself, in FP8."""

    @staticmethod
    def _prepare_input_fn(  # type: ignore[override]
        input_layouts: Any, desired_input_layouts: Any, module: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        x = inputs[0]
        if _runs_in_fp8(module) and _cuts_a_sequence(input_layouts[0], x):
            is_placed = isinstance(x, DTensor)
            return x if is_placed else DTensor.from_local(x, device_mesh, input_layouts, run_check=False)
        return torch_styles.ColwiseParallel._prepare_input_fn(
            input_layouts, desired_input_layouts, module, inputs, device_mesh
        )


class RowwiseParallel(torch_styles.RowwiseParallel):
    """torch's style; an FP8 layer shards its output along the sequence itself, and gathers its gradient in FP8."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        (layout,) = self.output_layouts if isinstance(self.output_layouts, tuple) else (self.output_layouts,)
        parallel = super()._apply(module, device_mesh)  # first: it refuses some weights
        if isinstance(module, nn.Linear) and (layout.is_shard() or layout.is_replicate()):
            module.output_layout = layout  # type: ignore[assignment]
        return parallel


class PrepareModuleInput(torch_styles.PrepareModuleInput):
    """torch's style; an input that FP8 layers of the module read is cast once, and gathered in FP8.

    Conditions: all column-parallel layers that are direct children of the module, such as q, k and v of attention, run
    in FP8; the input is sharded along its sequence, and a whole input is desired; the recipe has one scale per tensor.
    Other readers of the input in the module get its FP8 values. Otherwise inputs are gathered as by torch. An input
    that none of these layers reads unchanged is gathered so from the second forward on.
    """

    _module: nn.Module
    _last: tuple[Any, list[Any]] | None = None
    """The slots of the layer that cast the last input, and those of the layers that used it."""
    _is_read_otherwise = False

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        of_module = copy(self)  # a plan may be used for many blocks
        of_module._module = module
        return super(PrepareModuleInput, of_module)._apply(module, device_mesh)

    def _prepare_input_arg(self, input: Any, mesh: DeviceMesh, input_layout: Any, desired_layout: Any) -> Any:
        if (
            isinstance(input, Tensor)
            and _cuts_a_sequence(input_layout, input)
            and desired_layout.is_replicate()
            and (reader := _first_reader(self._module, input.shape[-1])) is not None
        ):
            gathered = self._gathered(input, reader, mesh, input_layout)
            if gathered is not None:
                return gathered
        return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)

    @torch.compiler.disable(reason="collectives of FP8 codes")
    def _gathered(self, x: Tensor, reader: LinearLayer, mesh: DeviceMesh, layout: Any) -> Any:
        """The whole of ``x`` in FP8; None if it is to be gathered in high precision."""
        if self._last is not None and not any(each is self._last[0] for each in self._last[1]):
            self._is_read_otherwise = True  # the scale belongs to another tensor
            self._last = None
            warnings.warn(
                f"PrepareModuleInput of {type(self._module).__name__}: none of its layers uses the input unchanged, "
                "so that it is gathered in high precision",
                stacklevel=2,
            )
        gathered = None if self._is_read_otherwise else _gathered(x, reader, mesh, layout)
        if gathered is None:
            return None
        self._last = reader.ensure_slots()[0], gathered._local_tensor.takers
        return gathered.to_local() if self.use_local_output else gathered


Float8ColwiseParallel = ColwiseParallel
Float8RowwiseParallel = RowwiseParallel
PrepareFloat8ModuleInput = PrepareModuleInput


def _runs_in_fp8(module: nn.Module) -> bool:
    return isinstance(module, LinearLayer) and module.fp8 and module.running_context().enabled


def _cuts_a_sequence(layout: Any, x: Tensor) -> bool:
    return layout is not None and layout.is_shard() and layout.dim % x.dim() != x.dim() - 1


def _first_reader(module: nn.Module, features: int) -> LinearLayer | None:
    """The first column-parallel child of ``module`` that reads ``features``; None if one of them is not in FP8."""
    readers = [
        child
        for child in module.children()
        if isinstance(child, nn.Linear)
        and child.in_features == features
        and is_dtensor(child.weight)
        and child.weight.placements[-1].is_shard(0)  # type: ignore[attr-defined]
    ]
    first = readers[0] if readers and all(map(_runs_in_fp8, readers)) else None
    return first if isinstance(first, LinearLayer) else None


def _gathered(x: Tensor, reader: LinearLayer, mesh: DeviceMesh, layout: Any) -> Any:
    """The whole of ``x`` as a DTensor of an FP8Tensor; None if the recipe's layout has several scales."""
    context = reader.running_context()
    local: Any = x
    if isinstance(x, DTensor):
        if tuple(x.placements) != (layout,):
            return None
        local = x.to_local()
    parallel = Parallel("column", mesh.get_group(), layout.dim % local.dim())
    require_shared_scales(context.group, parallel.group)
    require_agreement(context.recipe, parallel)  # before ranks branch on their recipes
    if not context.recipe.cast(Role.INPUT).layout.has_one_scale:
        return None
    dtype = autocast_dtype(local.device.type) or local.dtype
    slots = reader.ensure_slots(local.device)
    observe = torch.is_grad_enabled() and reader.training and context.observe
    product = Product(context.recipe, slots[0], observe)
    return _GatherInFP8.apply(local.to(dtype), product, mesh, layout, parallel)


class _GatherInFP8(torch.autograd.Function):
    """Gathers a piece of x in FP8; the gradient, a partial sum, is reduce-scattered in its own dtype."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, product: Product, mesh: DeviceMesh, layout: Any, parallel: Parallel
    ) -> Any:
        ctx.mesh, ctx.layout = mesh, layout
        is_observed = product.observe and isinstance(product.recipe, DelayedScaling)
        observed = x.new_zeros((), dtype=torch.float32) if is_observed else None  # copied to each reader's slot
        x8, _ = gathered_forward(x, product, parallel, observed)
        row = x8.rowwise
        assert row is not None
        shape = list(x.shape)
        assert parallel.sequence is not None
        shape[parallel.sequence] *= mesh.size()
        operands = Quantized(row, transposed(row) if product.observe or ctx.needs_input_grad[0] else None)
        whole = FP8Tensor(operands, product.cast(Role.INPUT), torch.Size(shape), x.dtype, observed=observed)
        return DTensor.from_local(whole, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> tuple[Any, None, None, None, None]:  # type: ignore[override]
        if not isinstance(dy, DTensor):
            dy = DTensor.from_local(dy, ctx.mesh, [Partial()], run_check=False)
        return dy.redistribute(placements=[ctx.layout]).to_local(), None, None, None, None
