"""FSDP2 gathers the weights of FP8 layers in FP8: half the bytes, and bitwise identical results.

``fully_shard`` keeps an ``FSDPParam`` for each parameter. :func:`gather_in_fp8` changes the class of those of FP8
weights in place; parameters, optimizer and ``state_dict`` do not change. In an FP8 region such a weight is cast as a
shard, its codes are gathered, and its layer gets a :class:`GatheredWeight`. Any other use of it, in high precision or
by another recipe, gathers the weight in high precision at that time, and gets those values.

If a scale depends on all shards of a weight, the amaxes of all shards are needed. One all-reduce computes those of all
weights, at the first gather after a step of an optimizer that owns one of them. Whether it runs never depends on state
of one rank only. Delayed scaling needs no such all-reduce: the update of scales reduces the shards' amaxes with all
others.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_fp8 import fp8_region, ops
from lightning_fp8.capture import is_capturing
from lightning_fp8.delayed.history import Slot, span_of
from lightning_fp8.fp8_region import FP8Context
from lightning_fp8.modules.conv1d import TransposedLinear
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.modules.state import names_of_fp8_weights
from lightning_fp8.names import clean_name, gemm_name
from lightning_fp8.notices import say_once
from lightning_fp8.numerics import scaling
from lightning_fp8.numerics.formats import E8M0_DTYPE
from lightning_fp8.numerics.recipes import DelayedScaling, Recipe
from lightning_fp8.numerics.scaled import Layout, Role, ScaledTensor
from lightning_fp8.ops import Quantized
from lightning_fp8.ops.cast import absolute_max, tensor_amax
from lightning_fp8.optimizer_steps import after, listen, parameter_ids
from lightning_fp8.parallel.agreement import require_same, require_same_plans
from lightning_fp8.parallel.collectives import all_gather
from lightning_fp8.traced import was_traced
from lightning_fp8.weights.fp8_tensor import FP8Tensor, transposes

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, _from_local_no_grad
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    _NAMES: dict[Any, tuple[str, ...]] = {
        FSDPParam: (
            "_sharded_local_tensor",
            "accumulate_unsharded_grad_if_needed",
            "all_gather_inputs",
            "free_unsharded_param",
            "init_unsharded_param",
            "reset_sharded_param",
            "to_sharded",
        ),
        FSDPParamGroup: ("_reshard_after_forward", "_to_sharded", "_use_post_forward_mesh", "wait_for_unshard"),
    }
    _missing = [name for cls, names in _NAMES.items() for name in names if not hasattr(cls, name)]
except ImportError as error:
    _missing = [str(error)]
    FSDPParam = object  # type: ignore[assignment, misc]


def gather_in_fp8(model: nn.Module) -> None:
    """Let FSDP2 gather the weights of ``model``'s FP8 layers in FP8 wherever they run in FP8.

    Calling it again changes nothing. A model that is not sharded yet does not change.
    """
    sharded = _sharded_modules(model)
    if not sharded:
        return
    if _missing:
        _warn_of_other_torch()
        return
    names = {module: clean_name(name) for name, module in model.named_modules()}
    modules_by_name = {name: module for module, name in names.items()}
    found = [(state, group, param) for _, state in sharded for group in _groups(state) for param in group.fsdp_params]
    weights = next((param.weights for *_, param in found if isinstance(param, GatheredParam)), None) or _Weights(model)
    _weights_of[sharded[0][0]] = weights
    for *_, param in found:
        weights.add_groups(param.mesh_info)
    for state, group, param in found:
        owner, name = param._module_info.module, param._module_info.param_name
        if isinstance(param, GatheredParam) or not isinstance(owner, LinearLayer) or name not in owner.weight_names:
            continue
        if isinstance(param._sharded_local_tensor, FP8Tensor):  # which gathers its codes itself
            continue
        parts = names[owner].split(".")
        around = [modules_by_name.get(".".join(parts[:length])) for length in range(len(parts) + 1)]
        param.__class__ = GatheredParam
        param.attach(weights, owner, group, state, [each for each in (model, *around) if each is not None])
        gathered = not group.is_sharded or group._all_gather_result is not None  # inside a forward
        param.stays_in_high_precision = gathered and torch.is_grad_enabled()
        weights.params.append(param)
    for module, state in sharded:
        gathers = any(isinstance(param, GatheredParam) for group in _groups(state) for param in group.fsdp_params)
        if module not in _hooked and (gathers or module in _weights_of):
            _hooked.add(module)
            module.register_forward_pre_hook(_before_forward, prepend=True)


def reasons_for_high_precision(model: nn.Module, recipe: Recipe) -> dict[str, str]:
    """Names of the linear layers of ``model`` whose weights FSDP2 gathers in high precision, with the reasons."""
    if _missing:
        return {}
    context = FP8Context(recipe)
    names = {module: clean_name(name) for name, module in model.named_modules()}
    reasons = {}
    for _, state in _sharded_modules(model):
        for group in _groups(state):
            for param in group.fsdp_params:
                if isinstance(param, GatheredParam) and param.layer.fp8 and (why := param.why_not(context)):
                    gemm = param.layer.gemms[param.gemm]
                    reasons[gemm_name(names[param.layer], gemm)] = why
    return reasons


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on ``model`` or one of its modules."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _sharded_modules(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """The modules that ``fully_shard`` was called for, and their FSDP states."""
    return [(each, each._get_fsdp_state()) for each in model.modules() if isinstance(each, FSDPModule)]


def _groups(state: Any) -> Sequence[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.8 has one group
    return [each for each in [state._fsdp_param_group] if each is not None] if groups is None else groups


_said: dict[Any, str] = {}


def _warn_of_other_torch() -> None:
    say_once(
        _said,
        f"the FSDP2 of torch {torch.__version__} is not supported by lightning_fp8 ({', '.join(_missing)}): it gathers "
        "the weights of FP8 layers in high precision",
        stacklevel=3,
    )


# --- State of a model's weights ---------------------------------------------------------------------------------------


class _Weights:
    """The weights of a model that FSDP2 may gather in FP8."""

    def __init__(self, model: nn.Module) -> None:
        self.params: list[GatheredParam] = []
        self.begun: list[Recipe | None] = []
        self.groups: list[dist.ProcessGroup] = []
        self._model = weakref.ref(model)

    def add_groups(self, mesh_info: Any) -> None:
        """Add the process groups that share parameters: of shards, and of replicas."""
        sizes = getattr(mesh_info, "shard_mesh_size", 1), getattr(mesh_info, "replicate_mesh_size", 1)
        names = "shard_process_group", "replicate_process_group"
        groups = [getattr(mesh_info, name) for name, size in zip(names, sizes) if size > 1]
        self.groups += [each for each in groups if each not in self.groups]

    def refresh_amaxes(self, asking: GatheredParam, recipe: Recipe) -> None:
        """Compute the amaxes of ``asking``, and of all changed weights like it that this recipe gathers."""
        layout, group, context = recipe.cast(Role.WEIGHT).layout, asking.process_group, FP8Context(recipe)
        alike = [each for each in self.params if each.process_group is group and each.is_stale(layout)]
        stale = [each for each in alike if each is asking or (each.layer.fp8 and not each.why_not(context))]
        found = [each.amax_of_shard(layout) for each in stale]
        amaxes = torch.cat([amax.reshape(-1) for amax in found])
        # MAX may drop a NaN, and ranks must have equal values; inf gives the same scale.
        torch.nan_to_num_(amaxes, nan=math.inf, posinf=math.inf)
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
        for param, amax in zip(stale, amaxes.split([amax.numel() for amax in found])):
            param.amaxes[layout] = param.generation(), amax

    def begin(self, context: FP8Context) -> None:
        """At a recipe's first forward, compare it over ranks, and warn of weights that it gathers in high precision.

        At the first forward of all, also compare how ranks shard and convert the model.

        Raises:
            RuntimeError: If ranks differ, on all ranks.
        """
        recipe = context.recipe if context.enabled else None
        if recipe in self.begun:
            return
        model = self._model()
        if not self.begun and model is not None:
            require_same_plans(model, names_of_fp8_weights(model))
        self.begun.append(recipe)
        for group in self.groups:
            what = "ranks that shard a model must run it by the same recipe of FP8"
            require_same(what, "high precision" if recipe is None else repr(recipe), group)
        if recipe is None:
            return
        reasons: dict[str, int] = {}
        for each in self.params:
            if each.layer.fp8 and each.layer.history is not None and each.layer.history.plugin_recipe is None:
                reasons[each.why_not(context)] = reasons.get(each.why_not(context), 0) + 1
        counted = [f"{number} because {why}" for why, number in reasons.items() if why]
        if counted:
            warnings.warn(
                "FSDP2 gathers weights of FP8 layers in high precision under "
                f"recipe={context.recipe.name!r}: {'; '.join(counted)}",
                stacklevel=2,
            )


_weights_of: weakref.WeakKeyDictionary[nn.Module, _Weights] = weakref.WeakKeyDictionary()
"""By the outermost sharded module of each model."""

_hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose forward pre-hook chooses how their weights are gathered."""

_attached: weakref.WeakSet[Any] = weakref.WeakSet()
"""All weights in this process that can be gathered in FP8."""


def _after_step(optimizer: Any) -> None:
    """Mark the amaxes of weights stepped by an optimizer as stale; graphs from before its step are not used again."""
    held = parameter_ids(optimizer)
    stepped = {id(each.weights): each.weights for each in list(_attached) if id(each.sharded_param) in held}
    for weights in stepped.values():
        for param in weights.params:
            param.stays_in_high_precision = False
            param.changes += id(param.sharded_param) in held


@torch.compiler.disable
def _before_forward(module: Any, *_: Any) -> None:
    """Choose how the weights are gathered that this forward gathers; runs before FSDP2's own hook."""
    if (weights := _weights_of.get(module)) is not None:
        own = weights.params[0].layer.own_context if weights.params else None
        weights.begin(fp8_region.current_context(own))
    state = module._get_fsdp_state()
    for each in (state, *state._states_to_forward_prefetch):
        for group in _groups(each):
            params = [param for param in group.fsdp_params if isinstance(param, GatheredParam)]
            if params:
                _choose(group, params)


def _choose(group: Any, params: list[GatheredParam]) -> None:
    wanted = [param.recipe_in(param.layer.running_context()) for param in params]
    gathered = not group.is_sharded or group._all_gather_result is not None
    if gathered and any(param.recipe not in (None, recipe) for param, recipe in zip(params, wanted)):
        group.wait_for_unshard()
        found = [(each.sharded_param, each._unsharded_param.requires_grad) for each in group.fsdp_params]
        group._to_sharded()
        params[0].set_requires_grad(found)
        gathered = False
    grad = torch.is_grad_enabled()
    for param, recipe in zip(params, wanted):
        if not gathered:
            param.use(recipe)
        if param.recipe is None:
            param.stays_in_high_precision |= grad


# --- A weight ---------------------------------------------------------------------------------------------------------


class _Extension:
    """Returned to FSDP2 instead of a shard that is gathered in FP8, so that it does not gather the shard itself."""

    fsdp_pre_all_gather = fsdp_post_all_gather = None


_SPECS = "_unsharded_dtensor_spec", "_tp_spec"
"""FSDPParam's attributes for the placement of a tensor-parallel weight; the second one until torch 2.8."""


class GatheredParam(FSDPParam):
    """An ``FSDPParam`` whose all-gather transfers FP8 codes while :attr:`recipe` is not None.

    It has two unsharded parameters, both autograd leaves: torch's own, and a :class:`GatheredWeight`.

    Attributes:
        recipe: the recipe it is gathered by; None in high precision.
        changes: number of changes that the weight's version counter does not record.
        amaxes: amaxes of the whole weight by layout, each with the :meth:`generation` it was computed for.
        stays_in_high_precision: a graph of this step may use the parameter that was gathered in high precision.
        read_otherwise: the weight was read in high precision or by another recipe in an FP8 region.
        needs_both: both operands are gathered, because a backward pass recomputes the layer's forward.
    """

    def attach(self, weights: _Weights, layer: LinearLayer, group: Any, state: Any, around: list[nn.Module]) -> None:
        """Initialize this object, whose class was changed; ``around``: the modules that contain the layer."""
        self.weights = weights
        self.layer = layer
        self.gemm = layer.weight_names.index(self._module_info.param_name) if len(layer.gemms) > 1 else 0
        self._group = weakref.ref(group)
        self._state = weakref.ref(state)
        self._around = [weakref.ref(each) for each in around]
        self.recipe: Recipe | None = None
        self.changes = 0
        self.amaxes: dict[Layout, tuple[Any, Tensor]] = {}
        self.stays_in_high_precision = self.read_otherwise = self.needs_both = False
        self._operands_asked = False, False
        self._scale: Tensor | None = None
        self._amax_of_shard: Tensor | None = None
        self._other: tuple[Any, list[Tensor]] = None, []
        self._requires_grad_before: list[tuple[Tensor, bool]] = []
        _attached.add(self)
        listen(after, _after_step)

    @property
    def slot(self) -> Slot:
        return self.layer.ensure_slots()[self.gemm][Role.WEIGHT]

    @property
    def has_experts(self) -> bool:
        """Whether it is ``[E, N, K]``. Ranks have whole experts, whose scales are their own."""
        return len(self._orig_size) == 3

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self.mesh_info.shard_process_group  # type: ignore[union-attr]

    @property
    def is_divided(self) -> bool:
        """Whether it is sharded over several ranks."""
        return isinstance(self.mesh_info, FSDPMeshInfo) and self.mesh_info.shard_mesh_size > 1

    # Whether it is gathered in FP8

    def recipe_in(self, context: FP8Context) -> Recipe | None:
        """The recipe by which a forward in ``context`` gathers it; None in high precision."""
        if not (context.enabled and self.layer.fp8):
            return None
        self.weights.begin(context)
        return None if self.stays_in_high_precision or self.why_not(context) else context.recipe

    def why_not(self, context: FP8Context) -> str:
        """Why the weight is gathered in high precision in ``context``; empty if it is gathered in FP8.

        The result is the same on all ranks.
        """
        recipe = context.recipe
        layout = recipe.cast(Role.WEIGHT).layout
        if not self.is_divided:
            return "it is not sharded"
        if self.fsdp_placement.dim != 0:
            return f"it is sharded along dimension {self.fsdp_placement.dim}"
        if self._module_info.shared_modules:
            return "several modules share it"
        if isinstance(self.layer, TransposedLinear):
            return "Conv1D stores it transposed"
        if len(self.layer.weight_names) > len(self.layer.gemms):
            return "parameters_split concatenates several parameters"
        if self.read_otherwise:
            return "it was read in high precision or by another recipe in a region of FP8"
        group, state = self._group(), self._state()
        if group is None or state is None or group._use_post_forward_mesh:
            return "reshard_after_forward is a number of ranks"
        size = self._orig_size[0]
        rows, ranks = self.padded_sharded_param_size[0], self.mesh_info.shard_mesh_size
        if not layout.has_one_scale and rows * ranks != size:
            return f"its {size} {'experts' if self.has_experts else 'rows'} are not divided evenly over {ranks} ranks"
        block = {Layout.MX_1X32: 32, Layout.BLOCK_128X128: 128}.get(layout, 1)
        if rows % block and not self.has_experts:
            return f"the {rows} rows of a shard are not a multiple of {block}"
        if not layout.transposes:
            # FSDP2 decides for the root at the beginning of its first forward.
            keeps = state._is_root is None and state._auto_reshard_after_forward and self._is_in_root()
            if keeps or not group._reshard_after_forward:
                return "reshard_after_forward=False keeps it for the backward pass, which needs another operand"
            if self.is_compiled():
                return "compiled code keeps it for the backward pass, which needs another operand"
        if isinstance(recipe, DelayedScaling):
            plugin_recipe = None if self.layer.history is None else self.layer.history.plugin_recipe
            if not recipe.reduce_amax or not isinstance(plugin_recipe, (DelayedScaling, type(None))):
                return "each rank has its own scales"
            if context.group is not None and not _contains(context.group, self.process_group):
                return "fp8_group does not contain all ranks that share it"
        return ""

    def is_compiled(self) -> bool:
        """Whether the layer is known to run in compiled code, which can use operands only."""
        around = [module for each in self._around if (module := each()) is not None]
        return any(map(_is_compiled, around)) or was_traced("gathered", *self._orig_size)

    def _is_in_root(self) -> bool:
        """Whether it belongs to the outermost sharded module."""
        sharded = [
            module for each in self._around if (module := each()) is not None and hasattr(module, "_get_fsdp_state")
        ]
        outermost: Any = sharded[0] if sharded else None
        return outermost is not None and outermost._get_fsdp_state() is self._state()

    # Overrides of FSDPParam

    @property
    def _sharded_local_tensor(self) -> Any:
        return self._shard if self.recipe is None else _Extension()

    @property
    def _shard(self) -> Tensor:
        return self.sharded_param._local_tensor  # type: ignore[attr-defined, no-any-return]

    @property
    def all_gather_inputs(self) -> list[Tensor]:  # type: ignore[override]
        if self.recipe is None:
            return super().all_gather_inputs
        group = self._group()
        # A recomputed forward is followed by the gradients, while the weight stays gathered.
        backward = fp8_region.in_backward()
        keeps = group is not None and not group._reshard_after_forward
        self._operands_asked = not backward or self.needs_both or keeps, backward
        if getattr(self.layer, "is_transposed", False):
            self._operands_asked = self._operands_asked[::-1]
        inputs = self._cast(self.recipe, *self._operands_asked)
        sizes = [each.numel() * self.mesh_info.shard_mesh_size for each in inputs]  # type: ignore[union-attr]
        if [each.numel() for each in self.all_gather_outputs] != sizes:
            self.all_gather_outputs = []
        return inputs

    def init_unsharded_param(self) -> None:
        if self.recipe is None:
            super().init_unsharded_param()
            return
        operands = self._operands(self.recipe, self.all_gather_outputs, *self._operands_asked)
        cast = self.recipe.cast(Role.WEIGHT)
        weight = self._gathered_weight
        if weight is None:
            made = GatheredWeight(operands, cast, self._orig_size, self.param_dtype or self.orig_dtype)
            whole: Tensor = made
            if self.is_dtensor:  # sharded by tensor parallelism
                spec: Any = next(getattr(self, name) for name in _SPECS if hasattr(self, name))
                whole = _from_local_no_grad(made, spec)
            self._unsharded_param = nn.Parameter(whole, requires_grad=self.sharded_param.requires_grad)
            weight = self._gathered_weight
            assert weight is not None
            weight.source = self
        weight.operands, weight.cast, weight.recipe = operands, cast, self.recipe
        weight.observed = self._amax_of_shard

    def set_requires_grad(self, of_params: Sequence[tuple[Tensor, bool]]) -> None:
        """Set ``requires_grad`` of these sharded parameters until the weight is resharded.

        A change by the user while FSDP2 keeps weights gathered is lost when FSDP2 reshards them, and only then.
        """
        self._requires_grad_before = [(each, each.requires_grad) for each, _ in of_params]
        for each, requires_grad in of_params:
            each.requires_grad_(requires_grad)

    def to_sharded(self) -> None:
        super().to_sharded()
        self.set_requires_grad(self._requires_grad_before)
        self._requires_grad_before = []

    def free_unsharded_param(self) -> None:
        super().free_unsharded_param()
        weight = self._gathered_weight
        if weight is not None:
            weight.operands = Quantized(None, None)

    def accumulate_unsharded_grad_if_needed(self) -> None:
        other = self._other[0]
        if other is not None and other.grad is not None:
            grad, other.grad = other.grad, None
            own = self._unsharded_param.grad
            self._unsharded_param.grad = grad if own is None else own + grad
        super().accumulate_unsharded_grad_if_needed()

    def reset_sharded_param(self) -> None:  # after the weight is loaded or moved
        self.changes += 1
        super().reset_sharded_param()

    # The gather

    @property
    def _gathered_weight(self) -> GatheredWeight | None:
        leaf = self._other[0] if self.recipe is None else self.__dict__.get("_unsharded_param")
        return getattr(leaf, "_local_tensor", leaf)

    def use(self, recipe: Recipe | None) -> None:
        """Set the recipe of later gathers; must not be called while the weight is gathered."""
        if (recipe is None) != (self.recipe is None):
            kept = self.__dict__.pop("_unsharded_param", None), self.all_gather_outputs
            leaf, self.all_gather_outputs = self._other
            if leaf is not None:
                self._unsharded_param = leaf
            self._other = kept
        self.recipe = recipe

    def shard(self) -> Tensor:
        """The shard in the dtype of a high-precision gather, without padding."""
        shard = self._shard.detach().to(self.device, non_blocking=True)
        if hasattr(self, "param_dtype"):
            dtype = self.param_dtype
        else:  # before the first forward
            group = self._group()
            dtype = None if group is None else group.mp_policy.param_dtype
        return shard if dtype is None else shard.to(dtype)

    def generation(self) -> tuple[int, int, int]:
        """Identifies a value of the weight; changes at the same times on all ranks."""
        return self.changes, id(self.sharded_param), self.sharded_param._version

    def is_stale(self, layout: Layout) -> bool:
        """Whether the weight has changed since its amaxes for ``layout`` were computed."""
        return layout not in self.amaxes or self.amaxes[layout][0] != self.generation()

    def amax_of_shard(self, layout: Layout) -> Tensor:
        """``max |w|`` of this rank's rows, float32: one value, or one per column."""
        shard = self.shard()
        return tensor_amax(shard) if layout.has_one_scale else absolute_max(shard, 0)

    def _scale_of_all(self, recipe: Recipe) -> Tensor:
        """The scale for the cast of the whole weight: ``[]``, or ``[K]`` per column."""
        cast = recipe.cast(Role.WEIGHT)
        power_2, epsilon = cast.power_2_scale, cast.amax_epsilon
        if isinstance(recipe, DelayedScaling):
            scale = self.slot.scale_for(span_of(recipe))
            # Ranks have equal scales, but one rank's host may know the value earlier than another's.
            if self.slot.scale_is_nonzero() or float(scale) != 0:
                return scale
            power_2, epsilon = False, 0.0
        if self.is_stale(cast.layout):
            self.weights.refresh_amaxes(self, recipe)
        scale = scaling.current_scale(self.amaxes[cast.layout][1], cast.float8.max, power_2, epsilon)
        return scale.reshape(()) if cast.layout.has_one_scale else scale

    def _cast(self, recipe: Recipe, rowwise: bool, columnwise: bool) -> list[Tensor]:
        """This rank's part of the operands, as byte tensors ``[n]``."""
        if is_capturing():
            raise NotImplementedError("FSDP2's gathers of FP8 weights cannot be captured in a CUDA graph; use DDP")
        cast, shard = recipe.cast(Role.WEIGHT), self.shard()
        layout, quantize = cast.layout, ops.quantize_experts if self.has_experts else ops.quantize
        if layout.has_one_scale:
            self._scale = self._scale_of_all(recipe)
            amax = self._amax_of_shard = torch.zeros_like(self._scale) if isinstance(recipe, DelayedScaling) else None
            rows = shard.flatten(0, -2)  # a rank may have no expert
            q = ops.quantize(rows, cast, scale=self._scale, amax=amax, scale_is_nonzero=True).rowwise
            assert q is not None
            codes = q.data.contiguous().view(torch.uint8).reshape(-1)
            missing = self.padded_sharded_param_size.numel() - codes.numel()
            return [torch.cat([codes, codes.new_zeros(missing)]) if missing else codes]
        parts: list[Tensor] = []
        if rowwise or layout.transposes:
            q = quantize(shard, cast).rowwise
            assert q is not None
            parts += [q.data, q.scale_inv]
        if columnwise and layout is Layout.ROW and not self.has_experts:
            self._scale = self._scale_of_all(recipe)
            parts.append(ops.quantize_columns(shard, self._scale, cast.float8))
        elif columnwise and not layout.transposes:
            q = quantize(shard, cast, rowwise=False, columnwise=True).columnwise
            assert q is not None
            parts += [q.data, q.scale_inv] if self.has_experts else [q.data.t(), q.scale_inv.t()]
        return [part.contiguous().view(torch.uint8).reshape(-1) for part in parts]

    def _operands(self, recipe: Recipe, gathered: Sequence[Tensor], rowwise: bool, columnwise: bool) -> Quantized:
        """The operands of the whole weight, from the parts of all ranks."""
        cast, size, parts = recipe.cast(Role.WEIGHT), self._orig_size, iter(gathered)
        layout, dtype = cast.layout, cast.float8.dtype
        *experts, n, k = size

        def codes() -> Tensor:
            return next(parts).view(dtype).view(-1, *size[1:])[: size[0]]

        def operand(rows: int, columns: int) -> ScaledTensor:
            shape = *experts, rows, columns
            data, scale_inv = next(parts).view(dtype), next(parts).view(layout.scale_dtype)
            return ScaledTensor(data.view(shape), scale_inv.view(layout.scale_shape(*shape)), layout)

        if layout.has_one_scale:
            assert self._scale is not None
            return Quantized(ScaledTensor(codes(), 1.0 / self._scale, layout), None)
        row = operand(n, k) if rowwise or layout.transposes else None
        column = None
        if columnwise and self.has_experts and not layout.transposes:
            column = operand(k, n)
        elif columnwise and layout is Layout.ROW:
            assert self._scale is not None
            column = ScaledTensor(_transposed_codes(codes()), (1.0 / self._scale)[:, None], layout)
        elif columnwise and not layout.transposes:
            data, scale_inv = codes(), next(parts).view(E8M0_DTYPE).view(-1, k)
            column = ScaledTensor(_transposed_codes(data), scale_inv.t().contiguous(), layout)
        return Quantized(row, column)

    # Unplanned gathers

    def gather_operands(self, recipe: Recipe, rowwise: bool, columnwise: bool) -> Quantized:
        """Gather operands that the last gather did not include; must run on all ranks."""
        self.needs_both |= fp8_region.in_backward()
        parts = self._cast(recipe, rowwise, columnwise)
        gathered = self._gather(torch.cat(parts)).view(-1, sum(part.numel() for part in parts))
        split = gathered.split([part.numel() for part in parts], dim=1)
        return self._operands(recipe, [part.contiguous().view(-1) for part in split], rowwise, columnwise)

    def gather_in_high_precision(self) -> Tensor:
        """Gather the weight in high precision, now and from the next forward on; must run on all ranks."""
        self.read_otherwise = True
        data = self._sharded_param_data.to(self.device)
        gathered = self._gather(data if self.param_dtype is None else data.to(self.param_dtype))
        return gathered[: self._orig_size.numel()].view(self._orig_size)

    def _gather(self, part: Tensor) -> Tensor:
        gathered = part.new_empty(part.numel() * self.mesh_info.shard_mesh_size)  # type: ignore[union-attr]
        all_gather(gathered, part, group=self.process_group)
        return gathered


def _transposed_codes(codes: Tensor) -> Tensor:
    """``codes [R, K]`` to ``[K, R]``: a view on the CPU, a copy on a GPU, where GEMMs read rows."""
    return ops.transpose(codes) if codes.is_cuda else codes.t()


def _contains(group: dist.ProcessGroup, ranks_of: dist.ProcessGroup) -> bool:
    return {*dist.get_process_group_ranks(ranks_of)} <= {*dist.get_process_group_ranks(group)}


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


class GatheredWeight(FP8Tensor):
    """A weight ``[N, K]`` or ``[E, N, K]`` that FSDP2 has gathered in FP8; valid until it is resharded.

    Missing operands are gathered on request. Dequantized, it has the values of a gather in high precision.

    Attributes:
        source: the parameter that gathers it; None in compiled code.
        recipe: the recipe it was gathered by.
    """

    is_gathered = True
    source: GatheredParam | None = None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is torch.ops.aten.transpose.int and transposes(function, args[0], args):
            whole, (experts, n, k) = args[0], args[0].shape
            return whole._same(torch.Size((experts, k, n)), (n * k, *whole.stride()[:0:-1]))
        return super().__torch_dispatch__(function, types, args, kwargs)

    def quantized(self, *, rowwise: bool, columnwise: bool) -> Quantized:
        whole = None if self.source is None else self.source._gathered_weight
        if whole is not None and whole is not self and whole.recipe == self.recipe:
            self.operands = whole.operands  # this is a view made before the last gather
        row, column = self.operands
        transposes = self.scaling.transposes
        asked = (rowwise, columnwise) if self.is_contiguous() else (columnwise, rowwise)
        needs_row = row is None and (asked[0] or transposes)
        needs_column = asked[1] and column is None and not transposes
        if (needs_row or needs_column) and self.source is not None:
            assert self.recipe is not None
            more = self.source.gather_operands(self.recipe, needs_row, needs_column)
            self.operands = Quantized(row or more.rowwise, column or more.columnwise)
        return super().quantized(rowwise=rowwise, columnwise=columnwise)

    def dequantize(self) -> Tensor:  # type: ignore[override]
        if self.source is None:
            return super().dequantize()
        values = self.source.gather_in_high_precision()
        return values if self.is_contiguous() else values.mT

    def _same(self, size: torch.Size, strides: Sequence[int] | None = None) -> FP8Tensor:
        strides = self.stride() if strides is None and size == self.shape else strides
        made = GatheredWeight(self.operands, self.cast, size, self.dtype, observed=self.observed, strides=strides)
        made.source, made.recipe = self.source, self.recipe
        return made
