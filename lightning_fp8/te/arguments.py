"""Transformer Engine's arguments as data: the supported values, and alternatives to unsupported ones.

A name has the same meaning in all modules. There are three tables: the supported values of constructor arguments, the
arguments of which only the default is supported, with alternatives, and the arguments that Transformer Engine has
removed. :func:`checked_arguments` checks constructors by them. The defaults of supported arguments are in the
constructors' signatures. Each module checks its sizes and combinations of arguments itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple, TypedDict, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from lightning_fp8.arguments import one_of, require_bool, require_number, require_positive
from lightning_fp8.numerics.scaling import FLOAT32_MAX

Init = TypeVar("Init", bound=Callable[..., None])


class ParallelArguments(TypedDict, total=False):
    """Transformer Engine's arguments of tensor and sequence parallelism, and of overlapped communication.

    Of all other parallel arguments only the defaults are supported. See docs/distributed_te.md.

    Attributes:
        parallel_mode: for a linear layer, ``"column"`` shards its output features over the ranks, and ``"row"`` its
            input features. None does not shard it.
        set_parallel_mode: for LayerNormMLP, MultiheadAttention and TransformerLayer, makes the first linear layers
            column-parallel and the last one row-parallel.
        tp_group: the process group. It can be set later by ``set_tensor_parallel_group``.
        tp_size: the number of ranks, if ``tp_group`` is not passed yet.
        sequence_parallel: shard activations outside column- and row-parallel layers along their first dimension.
        return_layernorm_output_gathered: gather the returned output of the norm over the ranks.
        delay_wgrad_compute: for a linear layer, leave weight gradients to ``backward_dw()`` instead of backward passes.
        get_rng_state_tracker: returns the RNG tracker whose state ``rng_tracker_name`` is forked while weights are
            initialized.
        save_original_input: accepted and ignored. Results are the same. The backward pass always uses the saved FP8
            copy, which is smaller than the input.
        ub_name, name: accepted and ignored.
    """

    sequence_parallel: bool
    tp_group: Any
    tp_size: int
    parallel_mode: str | None
    set_parallel_mode: bool
    get_rng_state_tracker: Callable[[], Any] | None
    rng_tracker_name: str | None
    return_layernorm_output_gathered: bool
    ub_bulk_wgrad: bool
    ub_bulk_dgrad: bool
    ub_overlap_ag: bool
    ub_overlap_rs: bool
    ub_overlap_rs_dgrad: bool
    ub_name: str | None
    delay_wgrad_compute: bool
    symmetric_ar_type: str | None
    save_original_input: bool
    name: str | None


# --- Supported --------------------------------------------------------------------------------------------------------


def _or_none(check: Callable[[str, Any], Any], name: str, value: Any) -> None:
    if value is not None:
        check(name, value)


def _require_init_method(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name}={value!r} must be a function that fills a tensor in place, or None")


def _require_group(name: str, value: Any) -> None:
    if not isinstance(value, dist.ProcessGroup):
        raise TypeError(
            f"{name}={value!r} must be a process group of torch.distributed; for a mesh pass mesh.get_group()"
        )


_VALUES: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(
        (
            *("bias", "return_bias", "fuse_wgrad_accumulation", "return_layernorm_output", "zero_centered_gamma"),
            *("elementwise_affine", "checkpoint", "input_layernorm", "fuse_qkv_params", "qkv_weight_interleaved"),
            *("rotary_pos_interleaved", "qk_norm_before_rope", "apply_residual_connection_post_layernorm"),
            *("output_layernorm", "parallel_attention_mlp", "center_keys", "return_max_logit"),
            *("sequence_parallel", "set_parallel_mode", "return_layernorm_output_gathered", "save_original_input"),
        ),
        require_bool,
    ),
    **dict.fromkeys(("bottom_right_diagonal", "enc_dec_bottom_right_diagonal"), partial(_or_none, require_bool)),
    **dict.fromkeys(("init_method", "output_layer_init_method"), _require_init_method),
    **dict.fromkeys(("eps", "layernorm_epsilon", "qk_norm_eps"), partial(require_number, largest=FLOAT32_MAX)),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "drop_path_rate"), partial(require_number, largest=1.0)),
    **dict.fromkeys(("seq_length", "micro_batch_size", "layer_number"), partial(_or_none, require_positive)),
    **dict.fromkeys(("qkv_format", "attn_input_format"), partial(one_of, known=("sbhd", "bshd", "thd"))),
    "tp_size": require_positive,
    "tp_group": partial(_or_none, _require_group),
    "parallel_mode": partial(_or_none, partial(one_of, known=("column", "row"))),
    "normalization": partial(one_of, known=("LayerNorm", "RMSNorm")),
    "qk_norm_type": partial(_or_none, partial(one_of, known=("L2Normalization", "RMSNorm", "LayerNorm"))),
    "attention_type": partial(one_of, known=("self", "cross")),
    "layer_type": partial(one_of, known=("encoder", "decoder")),
    "softmax_type": partial(one_of, known=("vanilla", "off-by-one", "learnable")),
}

# --- Not supported ----------------------------------------------------------------------------------------------------


class _Unsupported(NamedTuple):
    default: Any
    instead: str


_UNSUPPORTED = {
    "symmetric_ar_type": _Unsupported(None, "sums are torch.distributed's all_reduce; leave it out"),
    **dict.fromkeys(
        (
            *("ub_bulk_wgrad", "ub_bulk_dgrad", "ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad"),
            "ub_tp_comm_overlap",
        ),
        _Unsupported(False, "collectives of tensor parallelism do not overlap with GEMMs chunk by chunk; leave it out"),
    ),
    "delay_wgrad_compute": _Unsupported(
        False, "Linear, LayerNormLinear and LayerNormMLP take it, and modules of several layers do not; leave it out"
    ),
    "num_splits": _Unsupported(1, "leave it at 1"),
}
_UNSUPPORTED_IN_FORWARD = {
    "fp8_output": _Unsupported(False, "the output is in high precision; the next layer casts it"),
    "fp8_grad": _Unsupported(False, "the gradient of the input is in high precision; leave it out"),
    "weight": _Unsupported(None, "Transformer Engine has removed it; a layer has its own weight"),
    "bias": _Unsupported(None, "Transformer Engine has removed it; a layer has its own bias"),
    "inference_params": _Unsupported(
        None, "MultiheadAttention keeps keys; pass all of them here, attn_mask_type='causal_bottom_right'"
    ),
    "score_mod": _Unsupported(None, "use torch.nn.attention.flex_attention"),
    "bf16_backward": _Unsupported(False, "run this attention in high precision: a recipe with fp8_dpa=False"),
    "num_splits": _UNSUPPORTED["num_splits"],
}
_REMOVED = {
    "skip_weight_param_allocation": "a layer has its own weight",
    "attention_softmax_in_fp32": "softmax is computed in float32",
    "apply_query_key_layer_scaling": "scores are scaled once, in float32",
}
_OF_ONE_MODULE: dict[tuple[str, str], Callable[[str, Any], Any] | None] = {
    **{(module, "delay_wgrad_compute"): require_bool for module in ("Linear", "LayerNormLinear", "LayerNormMLP")},
    **{("TransformerLayer", name): None for name in ParallelArguments.__annotations__ if name.startswith("ub_")},
}
"""Exceptions by module. A TransformerLayer's ``ub_...`` have no effect without ``ub_tp_comm_overlap``."""


def _refuse(name: str, value: Any, unsupported: dict[str, _Unsupported]) -> None:
    default, instead = unsupported[name]
    if value is None or (type(value) is type(default) and value == default):
        return
    shown = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise NotImplementedError(f"{name}={shown} is not supported: {instead}")


def refuse_in_forward(**asked: Any) -> None:
    """Raise a NotImplementedError, with an alternative, if an argument of a forward differs from its default."""
    for name, value in asked.items():
        _refuse(name, value, _UNSUPPORTED_IN_FORWARD)


# --- Checks -----------------------------------------------------------------------------------------------------------


_CHECKS = _VALUES | dict.fromkeys(_UNSUPPORTED, partial(_refuse, unsupported=_UNSUPPORTED))


def checked_arguments(init: Init) -> Init:
    """Decorate an ``__init__`` so that its arguments are first checked against the tables of this file.

    When the ``__init__`` returns, the module's attribute ``constructed`` is set to True.

    Raises:
        ValueError, TypeError: When the ``__init__`` is called, if a value is invalid, if an argument is unknown, or if
            Transformer Engine has removed it.
        NotImplementedError: When the ``__init__`` is called, if an argument that is not supported differs from its
            default.
    """
    module = init.__qualname__.partition(".")[0]
    parameters = [*inspect.signature(init).parameters.values()][1:]
    own = {each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD}
    positional = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]

    @wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in [*zip(positional, args), *kwargs.items()]:
            if name in _REMOVED:
                raise TypeError(f"{module}: {name} was removed from Transformer Engine: {_REMOVED[name]}; leave it out")
            if name not in own and name not in ParallelArguments.__annotations__:
                raise TypeError(f"{module} got an unexpected keyword argument {name!r}")
            check = _OF_ONE_MODULE.get((module, name), _CHECKS.get(name))
            if check is not None:
                check(name, value)
        init(self, *args, **kwargs)
        self.constructed = True

    return cast(Init, checked)


class PassesContextParallelGroup:
    """The method of Transformer Engine's modules that sets the context-parallel group of the attention inside them."""

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: Any = "p2p"
    ) -> None:
        """Set the group of each attention inside the module; see :class:`lightning_fp8.DotProductAttention`."""
        for child in self.modules():  # type: ignore[attr-defined]
            if child is not self and hasattr(child, "set_context_parallel_group"):
                child.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
