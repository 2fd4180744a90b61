"""LayerNormMLP: a norm, a linear layer, an activation and a second linear layer, as one module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import Unpack

from lightning_fp8 import ops
from lightning_fp8.arguments import one_dtype
from lightning_fp8.fp8_region import FP8Context
from lightning_fp8.functions.layernorm_mlp import MLP, LayerNormMLPFunction
from lightning_fp8.functions.norm import Norm
from lightning_fp8.functions.product import Product
from lightning_fp8.modules.fused.activations import activation_function, activation_named
from lightning_fp8.modules.fused.normed_layer import NormedLayer, detached, register_norm, reset_norm
from lightning_fp8.modules.initialization import Initialization, InitMethod, refuse_meta
from lightning_fp8.modules.tensor_parallel import TensorParallel, require_parallel_mode
from lightning_fp8.ops.activation import is_gated
from lightning_fp8.parallel.pieces import Cut
from lightning_fp8.te.arguments import ParallelArguments, checked_arguments
from lightning_fp8.weights.model_init import keep_weights_in_fp8

_NO_OVERRIDE = "LayerNormMLP; use LayerNormLinear, an activation and Linear"


class LayerNormMLP(NormedLayer):
    """``y = activation(norm(x) w1ᵀ + b1) w2ᵀ + b2`` of ``x [..., hidden_size]``, in FP8 inside ``fp8_autocast``.

    In FP8 the float32 values of the norm and of the activation are cast directly to FP8. In high precision the module
    computes as :class:`LayerNorm` or :class:`RMSNorm`, ``torch.nn.Linear``, the activation, and ``torch.nn.Linear``.
    Its parameters have Transformer Engine's names: ``layer_norm_weight``, ``layer_norm_bias`` (for LayerNorm),
    ``fc1_weight``, ``fc1_bias``, ``fc2_weight`` and ``fc2_bias``. The names of gated activations end in ``glu``. With
    one of them ``fc1_weight`` has ``2 * ffn_hidden_size`` rows. The output of the first half is activated and
    multiplied by the output of the second.

    Args:
        hidden_size: the number of columns of x and y.
        ffn_hidden_size: the number of columns of the activation's output.
        eps: added to the variance.
        bias: whether the linear layers have biases.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        activation: ``"gelu"`` (its tanh form), ``"qgelu"``, ``"relu"``, ``"srelu"`` (``"squared_relu"``), ``"silu"``,
            or gated ``"geglu"``, ``"qgeglu"``, ``"reglu"``, ``"sreglu"``, ``"swiglu"``, ``"glu"``,
            ``"clamped_swiglu"``.
        activation_params: the parameters of ``"clamped_swiglu"``, the activation of gpt-oss: ``limit`` (7.0), ``alpha``
            (1.702) and ``glu_linear_offset`` (1.0). For the halves a and g of its input it computes
            ``a' sigmoid(alpha a') (clamp(g, -limit, limit) + glu_linear_offset)`` with ``a' = min(a, limit)``. It is
            not fused with casts.
        zero_centered_gamma: ``layer_norm_weight`` holds gamma - 1 and starts at 0.
        init_method: initializes ``fc1_weight``. ``None`` is a normal distribution with a standard deviation of 0.023.
            Biases are initialized to 0.
        output_layer_init_method: the same for ``fc2_weight``.
        params_dtype: the dtype of the parameters. ``dtype`` is an alias.
        return_bias: return ``fc2_bias`` with y instead of adding it.
        return_layernorm_output: also return the norm's output ``[..., hidden_size]``, in y's dtype.
        fuse_wgrad_accumulation: applies to both weights; see :class:`lightning_fp8.Linear`.
        checkpoint: recompute the output of the first linear layer and the activation in the backward pass instead of
            saving them.
        seq_length, micro_batch_size: accepted and ignored.
        parallel: :class:`lightning_fp8.te.arguments.ParallelArguments`. With ``set_parallel_mode`` the first linear
            layer is column-parallel and the second row-parallel. The argument ``ffn_hidden_size`` is then the global
            size, and the attribute is this rank's. With a gated activation each rank has matching rows of both halves.

    Raises:
        ValueError, TypeError: If an argument or an input is invalid; the message names the valid values.
        NotImplementedError: If an argument that is not supported differs from its default.
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

    @checked_arguments
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
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
        flags = {
            "return_bias": return_bias,
            "return_layernorm_output": return_layernorm_output,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "checkpoint": checkpoint,
            "return_layernorm_output_gathered": parallel.get("return_layernorm_output_gathered", False),
        }
        self._keep(flags, hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        factory: Any = {"device": device, "dtype": one_dtype(params_dtype, dtype, ops.HIGH_PRECISION)}
        self.norm = Norm(float(eps), normalization == "RMSNorm", zero_centered_gamma)
        self.activation = activation_named(activation)
        self.activate = activation_function(self.activation, activation_params)
        self.in_features = self.out_features = self.hidden_size
        register_norm(self, self.norm, self.hidden_size, **factory)
        for name, (rows, columns) in self.matrices.items():
            self.register_parameter(f"{name}_weight", nn.Parameter(torch.empty(rows, columns, **factory)))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(rows, **factory)) if bias else None)
        self._delay_wgrads(parallel.get("delay_wgrad_compute", False))
        self.initializations = tuple(
            Initialization.told(method, parallel) for method in (init_method, output_layer_init_method)
        )
        self.reset_parameters()
        tensor_parallel = TensorParallel.asked(parallel)
        require_parallel_mode(parallel, tensor_parallel)
        if parallel.get("set_parallel_mode") and tensor_parallel.size > 1:
            self.ffn_hidden_size = tensor_parallel.part_of("ffn_hidden_size", self.ffn_hidden_size)
            fc1 = Cut(0, 2 if is_gated(self.activation) else 1)
            self.parallel_mode = "column"
            self.cut(tensor_parallel, {"fc1_weight": fc1, "fc1_bias": fc1, "fc2_weight": Cut(1)})
        self.ensure_slots()
        keep_weights_in_fp8(self, self.weight_names)

    def reset_parameters(self) -> None:
        """Initialize the parameters as the constructor does. Call it after ``to_empty`` of a module on meta.

        Raises:
            RuntimeError: If parameters are on meta, or if the module was loaded from a pickle that omits an
                ``init_method``.
        """
        refuse_meta(self)
        reset_norm(self, self.norm)
        with self._as_whole():
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
            inp: a bfloat16, float16 or float32 tensor.
            is_first_microbatch: see :meth:`lightning_fp8.Linear.forward`.

        Returns:
            y; with ``return_bias`` or ``return_layernorm_output`` a tuple of y, ``fc2_bias`` and the norm's output.

        Raises:
            TypeError, ValueError: See :meth:`lightning_fp8.Linear.forward`.
        """
        if self.parallel_mode is not None:
            return self._forward_of_piece(inp, is_first_microbatch)
        weights = self.fc1_weight, self.fc2_weight  # read once: a parametrization computes them on each access
        context = self._begin(inp, weights[0], is_first_microbatch, weights[1])
        fuses = context.enabled and self.fp8 and self.activation in ops.ACTIVATIONS
        run = self._fused if fuses else self._one_by_one
        y, normalized = run(inp, weights, context, is_first_microbatch)
        return self._returned(y, self.fc2_bias, normalized)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_of_piece(self, x: Tensor, is_first_microbatch: bool | None) -> Tensor | tuple[Tensor | None, ...]:
        """The forward of a sharded module: each rank activates its own features between the two linear layers."""
        weights = self.fc1_weight, self.fc2_weight
        context = self._begin(x, weights[0], is_first_microbatch, weights[1])
        y, normalized = self._one_by_one(x, weights, context, is_first_microbatch)
        bias = self._returned_bias(self.fc2_bias, "row") if self.return_bias else None
        return self._returned(y, bias, self._given_norm(normalized) if self.return_layernorm_output else None)

    def _fused(
        self, x: Tensor, weights: tuple[Tensor, Tensor], context: FP8Context, is_first_microbatch: bool | None
    ) -> tuple[Tensor, Tensor | None]:
        """y, and the norm's output with ``return_layernorm_output``."""
        added_bias = None if self.return_bias else self.fc2_bias
        parameters = weights[0], self.fc1_bias, weights[1], added_bias
        tensors = x.reshape(-1, self.hidden_size), self.layer_norm_weight, self.layer_norm_bias, *parameters
        (fc1, fc2), dtype = self._products(x, weights, tensors, context, is_first_microbatch)
        self._refuse_backward_override(fc1, _NO_OVERRIDE)
        mlp = MLP(self.norm, self.activation, fc1, fc2, dtype, self.checkpoint, self.return_layernorm_output)
        return self._shaped(LayerNormMLPFunction.apply(mlp, *detached(*tensors)), x.shape)

    def _one_by_one(
        self, x: Tensor, weights: Sequence[Tensor], context: FP8Context, is_first_microbatch: bool | None
    ) -> tuple[Tensor, Tensor]:
        """y and the norm's output. Norm and activation run in high precision; in FP8 the linear layers cast them."""
        added_bias = None if self.return_bias else self.fc2_bias
        calibrating = context.calibrating and not context.enabled and self.fp8
        products: Sequence[Product | None] = (None, None)
        dtype = x.dtype
        if context.enabled and self.fp8:
            others = self.fc1_bias, added_bias, self.layer_norm_weight, self.layer_norm_bias
            found, dtype = self._products(x, tuple(weights), others, context, is_first_microbatch)
            if self.parallel_mode is None:
                self._refuse_backward_override(found[0], _NO_OVERRIDE)
            products = found
        else:
            weights = [self._redirected(weight, is_first_microbatch, gemm) for gemm, weight in enumerate(weights)]

        def computed(x: Tensor) -> tuple[Tensor, Tensor]:
            normalized = self._normalized(x)
            h = self._layer(0, normalized, weights[0], self.fc1_bias, products[0], dtype, calibrating)
            return self._layer(1, self.activate(h), weights[1], added_bias, products[1], dtype, calibrating), normalized

        if calibrating or not (self.checkpoint and torch.is_grad_enabled()):  # a recomputation would observe twice
            return computed(x)
        both: tuple[Tensor, Tensor] = checkpoint(computed, x, use_reentrant=False, preserve_rng_state=False)
        return both

    def _layer(
        self, gemm: int, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product | None, dtype: torch.dtype,
        calibrating: bool,
    ) -> Tensor:  # fmt: skip
        """One of the linear layers. ``calibrating`` observes the tensors that FP8 would cast."""
        if self.parallel_mode is None and product is None:
            return self._calibrating_forward(x, weight, bias, gemm) if calibrating else F.linear(x, weight, bias)
        if self.parallel_mode is None and product is not None:
            rows = x.reshape(-1, x.shape[-1]).to(dtype)
            return self._multiplied(rows, weight, bias, product, dtype).view(*x.shape[:-1], weight.shape[0])
        if calibrating:
            self._observe(gemm, x, weight)
        y = self._multiply("row" if gemm else "column", x, weight, bias, product, dtype)
        return self._observed(gemm, y) if calibrating else y

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"bias={self.fc1_bias is not None}, activation={self.activation!r}, norm={self.norm}"
        )
