"""FP8 as a precision plugin of Fabric; :mod:`lightning_fp8.plugin.precision` adds the Trainer's hooks."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision.half import HalfPrecision
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp8 import optimizer_steps
from lightning_fp8.arguments import naming_arguments, require_module
from lightning_fp8.convert.apply import apply_conversion, when_sharded, with_gathers
from lightning_fp8.convert.attention_calls.attach import attach, detach
from lightning_fp8.convert.codes import adopt_codes
from lightning_fp8.convert.conversion import attending, nothing_runs_in_fp8
from lightning_fp8.convert.first_step import (
    FirstStep,
    idle_message,
    watch_first_steps,
    watched,
)
from lightning_fp8.convert.pinned import pin_again
from lightning_fp8.convert.plan import Plan, plan_conversion
from lightning_fp8.convert.policy import Policy, Skip
from lightning_fp8.convert.summary import ATTENTION, ConversionSummary
from lightning_fp8.delayed.history import AmaxHistory, span_of
from lightning_fp8.delayed.update import (
    decide_where_faster,
    forwards_begin,
    refuse_default_dtype_in_join,
    update,
    update_pending,
)
from lightning_fp8.fp8_region import FP8Context, fp8_context
from lightning_fp8.modules.tensor_parallel import CutLayer
from lightning_fp8.numerics.recipes import DelayedScaling, Recipe, described, fields_of, make_recipe
from lightning_fp8.plugin.dtypes import (
    Dtypes,
    cast_floating_point,
    cast_module,
    dtypes_of,
    naming_kept_buffers,
    requested_dtypes,
    table_name,
)
from lightning_fp8.plugin.kept_weights import KeptWeights
from lightning_fp8.plugin.states import (
    by_name,
    load_state,
    of_living_models,
    validated_states,
    with_equal_names,
    without_state,
)
from lightning_fp8.proofs import model_shapes


class FP8FabricPrecision(HalfPrecision):  # not Precision, for which Lightning's ThroughputMonitor takes float32's peak
    """FP8 training as a precision plugin of Fabric; the Trainer takes :class:`FP8Precision`.

    Linear layers run in FP8 inside forwards, everything else in BF16 by default. Conversion is in place and keeps
    parameters and ``state_dict`` keys. The delayed scales of a model are the plugin's state.

    Args:
        recipe: name, recipe object, or mapping; see :func:`lightning_fp8.make_recipe`.
        weights_dtype: ``None`` leaves weights as they are. Float32 weights compute in BF16 under ``torch.autocast``, as
            in ``bf16-mixed``; BF16 and float16 weights compute in their dtype, as in ``bf16-true``; a model with both
            runs under ``torch.autocast``, and takes inputs in the dtype of most of its weights. A dtype or its name,
            ``"bf16"`` or ``"fp32"``, casts parameters and persistent buffers, see :meth:`convert_module`.
        first_last_layers_bf16: keep the first and last blocks in BF16.
        num_layers_at_start_in_bf16: the number of first blocks.
        num_layers_at_end_in_bf16: the number of last blocks.
        replace_layers: turn ``torch.nn.Linear`` into FP8 layers; False runs only modules of ``lightning_fp8`` in FP8.
        skip: globs of the names of modules that stay in BF16, or a function ``(module, name) -> bool``; see
            :func:`convert_module`. In YAML a list of globs, or a function's dotted path.
        compute_dtype: dtype that everything else computes in, for float32 weights. If it differs from
            ``weights_dtype``, that is under ``torch.autocast``. ``None`` is ``weights_dtype``, or BF16 without one.
        attention: also run attention in FP8. True lets attention of unchanged models stay with SDPA from the first
            optimizer step on, on a GPU that was timed, if FP8 is slower for the lengths of its first training call.
            ``"always"`` runs all of it in FP8, as a recipe with ``fp8_dpa=True`` does.
        cache_fp8_weights: cast weights once per optimizer step and keep both FP8 copies, 2 bytes for each parameter.
            ``None`` does so if the Trainer accumulates gradients and no weight is sharded, and never in Fabric.
            In-place changes of a weight under ``torch.no_grad()`` are detected. In-place changes of its ``data``, such
            as ``weight.data.mul_(...)``, are not: stale copies are used until an optimizer steps, and in the Trainer
            until an epoch or an evaluation begins. With ``True``, copies of frozen weights outlive steps, except with
            delayed scaling. Pass ``False`` if your code makes such changes.
        fuse: run RMSNorms and gated MLPs of known forwards in fewer passes; see :func:`convert_module`.
        where_faster: let linear layers stay in BF16 where that is faster; see :func:`convert_module`.

    Raises:
        ValueError, TypeError: If an argument is invalid. The message lists valid values.

    ``summary`` is the table of the last model that was converted or whose first step ended. It shows what is planned
    and, after the first optimizer step or ``update_scales()``, what ran.
    """

    _place = "for Fabric; the Trainer takes FP8Precision"

    @naming_arguments
    def __init__(
        self,
        recipe: str | Recipe | Mapping[str, Any] = "delayed",
        weights_dtype: torch.dtype | str | None = None,
        first_last_layers_bf16: bool = True,
        num_layers_at_start_in_bf16: int = 1,
        num_layers_at_end_in_bf16: int = 1,
        replace_layers: bool = True,
        skip: Skip = (),
        compute_dtype: torch.dtype | str | None = None,
        attention: bool | Literal["always"] = False,
        cache_fp8_weights: bool | None = None,
        fuse: bool = True,
        where_faster: bool = True,
    ) -> None:
        self.weights_dtype, self.compute_dtype = requested_dtypes(weights_dtype, compute_dtype)
        weights, compute = self.weights_dtype or torch.float32, self.compute_dtype or torch.bfloat16
        self._dtypes = Dtypes(weights, compute, autocast=weights != compute)  # of the last model
        self._desired_input_dtype = compute  # read by ThroughputMonitor
        self.recipe, self._compares_attention = attending(make_recipe(recipe), attention)
        self.policy = Policy(
            first_last_layers_bf16,
            num_layers_at_start_in_bf16,
            num_layers_at_end_in_bf16,
            replace_layers,
            skip,
            fuse,
            where_faster,
        )
        self.kept_weights = KeptWeights(cache_fp8_weights)
        self.precision = self._dtypes.precision  # type: ignore[assignment]
        self.histories: dict[str, AmaxHistory] = {}
        self._observes = True
        self.summary: ConversionSummary | None = None
        self._pending_state: dict[str, Any] | None = None
        self._reported: set[str] = set()
        self._models: WeakKeyDictionary[nn.Module, Dtypes] = WeakKeyDictionary()
        self._forwards: list[ExitStack] = []

    def __repr__(self) -> str:
        """The recipe, and the arguments that are not their defaults; ``attention="always"`` is its ``fp8_dpa``."""
        arguments = {
            "weights_dtype": self.weights_dtype,
            "compute_dtype": None if self.compute_dtype == self.weights_dtype else self.compute_dtype,
            "attention": self._compares_attention,
            "cache_fp8_weights": self.kept_weights.chosen,
            **dataclasses.asdict(self.policy),
        }
        defaults = {name: parameter.default for name, parameter in signature(FP8FabricPrecision).parameters.items()}
        fields = dataclasses.asdict(self.recipe) | ({"fp8_dpa": False} if self._compares_attention else {})
        recipe = _changed(fields, dataclasses.asdict(type(self.recipe)()))
        return _call(self, {"recipe": _call(self.recipe, recipe), **_changed(arguments, defaults)})

    def __str__(self) -> str:
        """The text in Lightning's errors about a plugin that a Trainer, Fabric or a strategy does not support."""
        return (
            f"{self!r} ({self._place}. Import both from lightning, not from pytorch_lightning or lightning_fabric; "
            "leave precision= out; shard with ModelParallelStrategy, not FSDPStrategy or DeepSpeedStrategy)"
        )

    def __getstate__(self) -> dict[str, Any]:
        """The state that strategies send to the processes they start, without weak references."""
        return {**self.__dict__, "_models": dict(self._models)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _models=WeakKeyDictionary(state["_models"]))

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert linear layers in place, and cast parameters and persistent buffers to ``weights_dtype``, if given.

        A second call changes nothing. These are not cast, although Lightning's own true precision casts most of
        them: non-persistent buffers, such as rotary frequencies; complex and float8 tensors; modules with float8
        weights, whose scales are beside them; and, unless ``weights_dtype`` is float32, what a model of transformers
        lists in ``_keep_in_fp32_modules`` or ``_keep_in_fp32_modules_strict``.

        Raises:
            TypeError: If a layer that ``skip`` does not match has float8 codes that cannot be multiplied.
            ValueError: If ``compute_dtype`` is given without ``weights_dtype``, and weights compute in another dtype.
        """
        require_module("convert_module", module)
        adopt_codes(module, self.policy)  # before the cast, of which their dtype is
        said = self._set_dtypes(module)
        attention = FP8Context(self.recipe).attention
        plan = plan_conversion(module, self.policy, attention, self._compares_attention)
        plan = plan._replace(summary=plan.summary.with_high_precision(table_name(self._dtypes.compute)))
        for wrong in plan.wrong_globs:
            self._report_glob(wrong)
        if layers := pieces_of(module):
            rank_zero_warn(
                f"{layers}: Lightning saves only the shards of rank 0, of weights and of optimizer states. Training "
                "cannot resume from its checkpoints. Save gather_tensor_parallel(model), of "
                "lightning_fp8.te_checkpoints.tensor_parallel, and each rank's optimizer yourself, or shard the model "
                "with parallelize_module under ModelParallelStrategy"
            )
        history = apply_conversion(module, plan, rank_zero_warn)
        if attention:
            attach(module)
        history.plugin_recipe = self.recipe
        own = pin_again(module)
        plan = plan._replace(summary=with_gathers(plan.summary, module, self.recipe))
        when_sharded(module, partial(_report, weakref.WeakMethod(self.report_gathers)))
        if self.summary is None or not self.summary.is_of(plan.summary):
            self.summary = plan.summary
        is_new = self._register_history(history)
        self._watch(module, plan, is_new)
        if is_new:
            self._reported = set()
            rank_zero_info(f"{said}recipe: {described(fields_of(self.recipe))}\n{self.summary}")
            for name in dict.fromkeys(pinned.recipe.name for pinned in own):
                rank_zero_info(
                    f"convert_module gave the model recipe={name!r}: forwards under the plugin run by "
                    f"recipe={self.recipe.name!r} instead, and others, as after the Trainer has ended, by its own"
                )
            if all(layer.precision != "FP8" for layer in self.summary.layers):
                rank_zero_warn(nothing_runs_in_fp8(self.summary))
            if attention and not any(layer.kind == ATTENTION for layer in self.summary.layers):
                rank_zero_warn(
                    f"attention=True: no module of {type(module).__name__} was found that computes attention. "
                    "Calls of torch.nn.functional.scaled_dot_product_attention that the search did not find run in "
                    "FP8; attention by other functions does not"
                )
        elif said:
            rank_zero_info(said.rstrip())
        if self._pending_state is not None:
            self._load_states(validated_states(self._pending_state), self._pending_state.get("recipe"))
        return module

    def _watch(self, module: nn.Module, plan: Plan, is_new: bool) -> None:
        """Report what runs of ``module`` after its first optimizer steps."""
        if is_new:
            watch_first_steps(module, self._first_step(module, plan))

    def _first_step(self, module: nn.Module, plan: Plan, begins: bool = True) -> FirstStep:
        return FirstStep(module, plan, partial(_report, weakref.WeakMethod(self.report_first_step)), begins)

    def _set_dtypes(self, module: nn.Module) -> str:
        """Determine the dtypes of ``module``, cast it if that is asked for, and return the line about it, or ""."""
        if self.weights_dtype is None:
            self._dtypes, said = dtypes_of(module, self.compute_dtype)
            said *= self._models.get(module) != self._dtypes
        else:
            said = self._said_of_cast(*cast_module(module, self.weights_dtype), self.weights_dtype)
        self.precision = self._dtypes.precision  # type: ignore[assignment]
        self._models[module] = self._dtypes
        for model in self._models if self._dtypes_of_all is None else ():  # Fabric does not tell whose forward begins
            if not any(isinstance(hook, _OwnDtypes) and hook.of(self) for hook in model._forward_pre_hooks.values()):
                model.register_forward_pre_hook(own := _OwnDtypes(self), with_kwargs=True)
                model.register_forward_hook(own.leave, always_call=True)
        return said

    @property
    def _dtypes_of_all(self) -> Dtypes | None:
        """The dtypes of each model; None if they differ."""
        return self._dtypes if len({self._dtypes, *self._models.values()}) == 1 else None

    def _said_of_cast(self, num_cast: Counter[torch.dtype], num_kept: int, to: torch.dtype) -> str:
        """The line that says that parameters were cast; an empty string if there were none."""
        if not num_cast:
            return ""
        cast = " and ".join(f"{number} {str(dtype).removeprefix('torch.')}" for dtype, number in num_cast.items())
        kept = f"; other tensors that stay in float32, such as buffers that are not saved: {num_kept}" * bool(num_kept)
        masters = ". weights_dtype=None keeps them as float32 masters" * (torch.float32 in num_cast)
        return f"{cast} parameter tensors are {table_name(to)} from now on, because weights_dtype={to}{kept}{masters}\n"

    def report_first_step(self, summary: ConversionSummary) -> None:
        """Store the summary of the first training step, and warn of layers that should have run in FP8 and did not."""
        if summary == self.summary:
            return  # another callback has reported it
        before = self.summary
        self.summary = summary
        if said := idle_message(summary, self._reported, "plugin.summary"):
            rank_zero_warn(said)
        if summary.share_of_flops is not None and (before is None or before.verdict() != summary.verdict()):
            rank_zero_info(f"first step: {summary.verdict()}")
        for fallback in summary.fallbacks:
            if before is None or fallback not in before.fallbacks:
                rank_zero_info(fallback)

    def report_gathers(self, module: nn.Module) -> None:
        """For a model that was sharded after its conversion, report weights that FSDP2 gathers in high precision."""
        first_step = watched(module)
        before = self.summary if first_step is None else first_step.summary
        if before is None or (summary := with_gathers(before, module, self.recipe)) == before:
            return
        if first_step is not None:
            first_step.summary = summary
        self.summary = summary
        rank_zero_info(f"FSDP2 does not gather all weights of FP8 layers in FP8\n{summary}")

    def detach_attention(self) -> None:
        """Detach FP8 attention from the models when training ends."""
        for model in list(self._models):
            detach(model)
            pin_again(model, detached=True)

    @override
    def teardown(self) -> None:
        self.detach_attention()

    def _report_glob(self, wrong: str) -> None:
        """Warn of a glob that matches no layer. If several models share the plugin, another one may have the module."""
        rank_zero_warn(wrong)

    def _register_history(self, history: AmaxHistory) -> bool:
        """Remember another model's history; False if it is known."""
        if any(history is known for known in self.histories.values()):
            return False
        self._drop_unused()
        self.histories = by_name([*self.histories.values(), history])
        return True

    def _drop_unused(self) -> None:
        """Drop histories of deleted models. Not called in updates, where all ranks must drop the same histories."""
        if dist.is_initialized():
            gc.collect()
        self.histories = of_living_models(self.histories)

    @override
    def tensor_init_context(self) -> Any:
        """New floating-point tensors are ``weights_dtype``, if given."""
        return nullcontext() if self.weights_dtype is None else self._dtypes._replace(autocast=False).context()

    @override
    def module_init_context(self) -> Any:
        return self.tensor_init_context()

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """FP8 modules compute in FP8, the rest in the dtypes of the model."""
        with ExitStack() as stack:
            stack.enter_context(naming_kept_buffers(self._models))
            stack.enter_context(self._dtypes_of_all.context() if self._dtypes_of_all else nullcontext())
            self._forwards.append(stack)
            stack.callback(self._forwards.remove, stack)
            stack.enter_context(fp8_context(self._context()))
            histories, trains = list(self.histories.values()), self._observes and torch.is_grad_enabled()
            if trains:
                model_shapes.begin(self._models, optimizer_steps.number)
            if isinstance(self.recipe, DelayedScaling):
                for history in histories:
                    history.span = history.span or span_of(self.recipe)  # before it is compiled in
                forwards_begin(histories, trains, self.recipe.reduce_amax, observes=len(histories) == 1)
            elif trains:
                update_pending(histories)
            refuse_default_dtype_in_join()
            yield

    def _context(self) -> FP8Context:
        return FP8Context(self.recipe, observe=self._observes, weight_period=self.kept_weights.period)

    @override
    def convert_input(self, data: Any) -> Any:
        return data if (dtypes := self._dtypes_of_all) is None else cast_floating_point(data, dtypes.weights)

    @override
    def convert_output(self, data: Any) -> Any:
        return cast_floating_point(data, torch.get_default_dtype())

    def update_scales(self) -> None:
        """Reduce the amaxes of all models over all ranks in one collective and compute new scales.

        A step of a ``torch.optim.Optimizer`` that holds parameters of a model does this for the model.
        """
        decide_where_faster(self.histories.values())
        update(self.histories.values())
        for model in list(self._models):
            if (first_step := watched(model)) is not None:
                first_step.stepped()

    @override
    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with self._scales_follow(optimizer):
            return super().optimizer_step(optimizer, *args, **kwargs)

    @contextmanager
    def _scales_follow(self, optimizer: Any) -> Iterator[None]:
        """Run the hook of torch's optimizers for an ``optimizer`` that is not one of torch's and does not call it."""
        before = optimizer_steps.number
        yield
        if not isinstance(optimizer, Optimizer) and optimizer_steps.number == before:
            optimizer_steps.after_step(optimizer)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The recipe and every living model's scales and amax histories, as tensors, numbers and names."""
        return {
            "recipe": fields_of(self.recipe),
            **{name: history.state_dict() for name, history in of_living_models(self.histories).items()},
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`. Models that are not converted yet are loaded when they are converted.

        The scales of models that have no state in it are emptied.

        Raises:
            ValueError: If the state is malformed. Nothing is changed then.
        """
        states = validated_states(state_dict)
        self._drop_unused()
        if without := without_state(self.histories, states):
            self._report_without_state(without)
        self._load_states(states, state_dict.get("recipe"))

    def _report_without_state(self, names: list[str]) -> None:
        if isinstance(self.recipe, DelayedScaling):
            rank_zero_info(f"FP8 state: the checkpoint has none of {', '.join(names)}, whose scales start empty")

    def _load_states(self, states: dict[str, Any], saved: Any) -> None:
        if not self.histories:
            self._pending_state = {"recipe": saved, **states}
            return
        if isinstance(saved, dict) and saved != fields_of(self.recipe):
            before, now = described(saved), described(fields_of(self.recipe))
            rank_zero_info(f"FP8 state: it was saved with the recipe {before}; training continues with {now}")
        if alike := with_equal_names(states):
            rank_zero_warn(
                f"FP8 state: {' and '.join(alike)} hold tensors of the same names, and are loaded in the order in "
                "which models are set up. Set them up in the order of the run that saved them"
            )
        later = {name: state for name, state in states.items() if name not in self.histories}
        self._pending_state = {"recipe": saved, **later} if later else None
        for name, history in self.histories.items():
            if name in states:
                load_state(history, states[name], self.recipe, saved)


class _OwnDtypes:
    """Hooks of models whose dtypes differ: until a model's forward ends, its own dtypes, also of its inputs."""

    def __init__(self, plugin: FP8FabricPrecision | None = None) -> None:
        self._plugin = None if plugin is None else weakref.ref(plugin)
        self._entered: list[ExitStack] = []  # one for each forward that runs, since a model may call itself

    def __reduce__(self) -> Any:
        return _OwnDtypes, ()  # copies and pickles of a model have no plugin

    def of(self, plugin: FP8FabricPrecision) -> bool:
        return self._plugin is not None and self._plugin() is plugin

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        living = None if self._plugin is None else self._plugin()
        self._entered.append(stack := ExitStack())
        if living is None or not living._forwards or living._dtypes_of_all or model not in living._models:
            return None
        stack.enter_context(living._models[model].context())
        return cast_floating_point((args, kwargs), living._models[model].weights)

    def leave(self, *_: Any) -> None:
        if self._entered:  # an earlier hook may have raised
            self._entered.pop().close()


def _report(method: weakref.WeakMethod[Callable[[Any], None]], found: Any) -> None:
    """Call a plugin's method, if the plugin is alive."""
    if (report := method()) is not None:
        report(found)


def _call(made: Any, arguments: Mapping[str, str]) -> str:
    return f"{type(made).__name__}({', '.join(f'{name}={text}' for name, text in arguments.items())})"


def _changed(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the ``arguments`` that are not ``defaults``."""
    return {name: repr(value) for name, value in arguments.items() if value != defaults[name]}


def pieces_of(model: nn.Module) -> str:
    """The layers whose parameters are this rank's shards as plain tensors, as the subject of a message; or empty."""
    names = [name for name, module in model.named_modules() if isinstance(module, CutLayer) and module.cuts]
    return f"{len(names)} layers have a tensor-parallel group (tp_group), {names[0]!r} for example" if names else ""
