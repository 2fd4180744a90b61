"""LayerNormMLP: a norm, a linear layer, an activation and a second linear layer, as one module."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import Unpack

from lightning_fp8 import ops
from lightning_fp8.arguments import one_dtype, refuse_transforms, require_bool, require_bools, require_positive_or_none
from lightning_fp8.arguments.initialization import Initialization, InitMethod, default_init_method
from lightning_fp8.arguments.parallel import ParallelArguments
from lightning_fp8.autocast import FP8Context
from lightning_fp8.functions.layernorm_mlp import MLP, LayerNormMLPFunction
from lightning_fp8.modules.fused.activations import activate, activation_named
from lightning_fp8.modules.fused.arguments import (
    checked_norm,
    detached,
    register_norm,
    reset_norm,
)
from lightning_fp8.modules.fused.normed_layer import NormedLayer
from lightning_fp8.ops.activation.schema import is_gated


class LayerNormMLP(NormedLayer):
    """``y = activation(norm(x) w1ᵀ + b1) w2ᵀ + b2`` of ``x [..., hidden_size]``, in FP8 inside ``fp8_autocast``.

    In FP8 the float32 values of the norm and of the activation are cast at once; in high precision it is
    :class:`LayerNorm` or :class:`RMSNorm` followed by ``torch.nn.Linear``, the activation and another. Its parameters
    are ``layer_norm_weight``, ``layer_norm_bias`` (of LayerNorm), ``fc1_weight``, ``fc1_bias``, ``fc2_weight`` and
    ``fc2_bias``, as Transformer Engine's. ``fc1_weight`` of a gated activation, whose name ends in ``glu``, has
    ``2 * ffn_hidden_size`` rows: first what is activated, then what multiplies it.

    Args:
        hidden_size: columns of x and y.
        ffn_hidden_size: columns of the activation's output.
        eps: added to the variance.
        bias: whether the linear layers have biases.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        activation: ``"gelu"`` (its tanh form), ``"qgelu"``, ``"relu"``, ``"srelu"`` (``"squared_relu"``), ``"silu"``,
            or gated ``"geglu"``, ``"qgeglu"``, ``"reglu"``, ``"sreglu"``, ``"swiglu"``, ``"glu"``.
        zero_centered_gamma: ``layer_norm_weight`` holds gamma - 1 and starts at 0.
        init_method: called on ``fc1_weight``; ``None`` is normal with deviation 0.023. Biases start at 0.
        output_layer_init_method: the same for ``fc2_weight``.
        params_dtype: dtype of the parameters; ``dtype`` is the same by torch's name.
        return_bias: give ``fc2_bias`` beside y, not added.
        return_layernorm_output: give the norm's output ``[..., hidden_size]``, in x's dtype, beside y.
        fuse_wgrad_accumulation: add weights' gradients to their ``main_grad`` (float32) instead of ``grad``.
        checkpoint: keep neither the output of the first linear layer nor its activation for the backward pass, and
            compute them again there.
        seq_length, micro_batch_size: taken, and not needed.
        parallel: :class:`lightning_fp8.arguments.parallel.ParallelArguments`, at their defaults.

    Raises:
        ValueError, TypeError: arguments or an input that do not fit; the message says what would.
        NotImplementedError: a parallel argument that is not at its default.
    """

    gemms = ("fc1", "fc2")
    kind = "LayerNormMLP"
    weight_names = ("fc1_weight", "fc2_weight")
    bias_names = ("fc1_bias", "fc2_bias")
    hidden_size: int
    ffn_hidden_size: int
    checkpoint: bool
    fc1_weight: Tensor
    fc1_bias: Any
    fc2_weight: Tensor
    fc2_bias: Any

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        zero_centered_gamma: bool = False,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        fuse_wgrad_accumulation: bool = False,
        checkpoint: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **parallel: Unpack[ParallelArguments],
    ) -> None:
        super().__init__()
        require_bools(bias=bias)
        require_positive_or_none(seq_length=seq_length, micro_batch_size=micro_batch_size)
        self._keep(
            {"hidden_size": hidden_size, "ffn_hidden_size": ffn_hidden_size},
            {
                "return_bias": return_bias,
                "return_layernorm_output": return_layernorm_output,
                "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
                "checkpoint": checkpoint,
            },
            {"init_method": init_method, "output_layer_init_method": output_layer_init_method},
            parallel,
        )
        factory: Any = {"device": device, "dtype": one_dtype(params_dtype, dtype, ops.HIGH_PRECISION)}
        self.norm = checked_norm(normalization, eps, zero_centered_gamma)
        self.activation = activation_named(activation)
        self.in_features = self.out_features = self.hidden_size
        register_norm(self, self.norm, self.hidden_size, **factory)
        for name, (rows, columns) in self.matrices.items():
            self.register_parameter(f"{name}_weight", nn.Parameter(torch.empty(rows, columns, **factory)))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(rows, **factory)) if bias else None)
        self.initializations = tuple(
            Initialization.told(method or default_init_method, nn.init.zeros_, parallel)
            for method in (init_method, output_layer_init_method)
        )
        self.reset_parameters()
        self.ensure_slots()

    def reset_parameters(self) -> None:
        """Fill the parameters as the constructor does: those of a module that was on meta, after ``to_empty``.

        Raises:
            RuntimeError: an ``init_method`` was left out of a pickle, of which this module was loaded.
        """
        reset_norm(self, self.norm)
        for initialization, weight, bias in zip(self.initializations, *self.weights_and_biases()):
            initialization.fill([weight], [bias])
        self.forget_weight()

    @property
    def features(self) -> tuple[int, ...]:
        return self.hidden_size, self.ffn_hidden_size, self.hidden_size

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        fc1_features = self.ffn_hidden_size * (2 if is_gated(self.activation) else 1)
        return {"fc1": (fc1_features, self.hidden_size), "fc2": (self.hidden_size, self.ffn_hidden_size)}

    def forward(  # type: ignore[override]
        self, inp: Tensor, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor | None, ...]:
        """``[..., hidden_size]`` to the same shape in the input's dtype (or torch.autocast's).

        Args:
            inp: bfloat16, float16 or float32.
            is_first_microbatch: as in :meth:`lightning_fp8.Linear.forward`.

        Returns:
            y; with ``return_bias`` and ``return_layernorm_output`` a tuple of y, ``fc2_bias`` and the norm's output.

        Raises:
            TypeError, ValueError: as :meth:`lightning_fp8.Linear.forward`.
        """
        if is_first_microbatch is not None:
            require_bool("is_first_microbatch", is_first_microbatch)
        weights = self.fc1_weight, self.fc2_weight  # once: a parametrization may compute others each time
        self._check(inp, weights[0])
        context = self._context(inp)
        if context.enabled and self.fp8:
            y, normalized = self._fused(inp, weights, context, is_first_microbatch)
        else:
            calibrating = context.calibrating and not context.enabled and self.fp8
            w1, w2 = (self._in_main_grad(weight, is_first_microbatch) for weight in weights)
            y, normalized = self._in_high_precision(inp, (w1, w2), calibrating)
        return self._returned(y, self.fc2_bias, normalized)

    def _fused(
        self, x: Tensor, weights: tuple[Tensor, Tensor], context: FP8Context, is_first_microbatch: bool | None
    ) -> tuple[Tensor, Tensor | None]:
        """y and, if it is asked for, the norm's output."""
        added_bias = None if self.return_bias else self.fc2_bias
        parameters = weights[0], self.fc1_bias, weights[1], added_bias
        tensors = x.reshape(-1, self.hidden_size), self.layer_norm_weight, self.layer_norm_bias, *parameters
        refuse_transforms(self.kind, *tensors)
        slots, dtype, observe = self._enter_fp8(context, x, *weights)
        fc1, fc2 = (
            self._product(weight, (name,), of_gemm, observe, is_first_microbatch, context)
            for of_gemm, name, weight in zip(slots, self.weight_names, weights)
        )
        mlp = MLP(self.norm, self.activation, fc1, fc2, dtype, self.checkpoint, self.return_layernorm_output)
        return self._shaped(LayerNormMLPFunction.apply(mlp, *detached(*tensors)), x.shape)

    def _in_high_precision(self, x: Tensor, weights: tuple[Tensor, Tensor], calibrating: bool) -> tuple[Tensor, Tensor]:
        if calibrating or not (self.checkpoint and torch.is_grad_enabled()):  # what is recomputed is observed no more
            return self._unfused(x, *weights, calibrating)
        both: tuple[Tensor, Tensor] = checkpoint(
            self._unfused, x, *weights, calibrating, use_reentrant=False, preserve_rng_state=False
        )
        return both

    def _unfused(self, x: Tensor, w1: Tensor, w2: Tensor, calibrating: bool) -> tuple[Tensor, Tensor]:
        """y and the norm's output; ``calibrating`` observes what an FP8 forward and backward would cast."""
        normalized = self._normalized(x)
        added_bias = None if self.return_bias else self.fc2_bias
        if not calibrating:
            h = F.linear(normalized, w1, self.fc1_bias)
            return F.linear(activate(h, self.activation), w2, added_bias), normalized
        h = self._calibrating_forward(normalized, w1, self.fc1_bias)
        return self._calibrating_forward(activate(h, self.activation), w2, added_bias, gemm=1), normalized

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"bias={self.fc1_bias is not None}, activation={self.activation!r}, norm={self.norm}"
        )
