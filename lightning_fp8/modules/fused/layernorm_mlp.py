"""LayerNormMLP: a norm, a linear layer, an activation and a second linear layer, as one module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from lightning_fp8.modules.fused.activations import activation_function, activation_named
from lightning_fp8.modules.fused.normed_layer import NormedLayer, detached, positive
from lightning_fp8.modules.initialization import InitMethod
from lightning_fp8.modules.tensor_parallel import TensorParallel
from lightning_fp8.ops.activation import is_gated
from lightning_fp8.parallel.pieces import Cut
from lightning_fp8.te.arguments import ParallelArguments, checked_arguments
from lightning_fp8.weights.model_init import keep_weights_in_fp8


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
        self.hidden_size = positive("hidden_size", hidden_size)
        self.ffn_hidden_size = positive("ffn_hidden_size", ffn_hidden_size)
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.fuse_wgrad_accumulation, self.checkpoint = fuse_wgrad_accumulation, checkpoint
        factory: Any = {"device": device, "dtype": one_dtype(params_dtype, dtype, ops.HIGH_PRECISION)}
        norm = Norm(float(eps), normalization == "RMSNorm", zero_centered_gamma)
        self.activation = activation_named(activation)
        self.activate = activation_function(self.activation, activation_params)
        self.in_features = self.out_features = self.hidden_size
        self._register_norm(norm, self.hidden_size, parallel, **factory)
        for name, (rows, columns) in self.matrices.items():
            self.register_parameter(f"{name}_weight", nn.Parameter(torch.empty(rows, columns, **factory)))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(rows, **factory)) if bias else None)
        self._initialize(parallel, init_method, output_layer_init_method)
        tensor_parallel = TensorParallel.of_several_layers(parallel)
        if tensor_parallel.size > 1:
            self.ffn_hidden_size = tensor_parallel.part_of("ffn_hidden_size", self.ffn_hidden_size)
            fc1 = Cut(0, 2 if is_gated(self.activation) else 1)
            self.parallel_mode = "column"
            self.cut(tensor_parallel, {"fc1_weight": fc1, "fc1_bias": fc1, "fc2_weight": Cut(1)})
        self.ensure_slots()
        keep_weights_in_fp8(self, self.weight_names)

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
        return (self._forward if self.parallel_mode is None else self._forward_of_piece)(inp, is_first_microbatch)

    def _forward(self, x: Tensor, is_first_microbatch: bool | None) -> Tensor | tuple[Tensor | None, ...]:
        """A rank of a sharded module activates its own features between the two linear layers."""
        weights = self.fc1_weight, self.fc2_weight  # read once: a parametrization computes them on each access
        context = self._begin(x, weights[0], is_first_microbatch, weights[1])
        biases = self.fc1_bias, None if self.return_bias else self.fc2_bias
        in_fp8, is_piece = context.enabled and self.fp8, self.parallel_mode is not None
        if in_fp8 and not is_piece:
            y, normalized = self._fused(x, weights, biases, context, is_first_microbatch)
            return self._returned(y, self.fc2_bias, normalized)
        calibrating = context.calibrating and not context.enabled and self.fp8
        products: list[Any] = [None, None]
        matrices, dtype = [*weights], x.dtype
        if in_fp8:
            others = *biases, self.layer_norm_weight
            products, dtype = self._products(x, weights, others, context, is_first_microbatch)
        else:
            matrices = [self._redirected(weight, is_first_microbatch, gemm) for gemm, weight in enumerate(weights)]

        def multiply(gemm: int, x: Tensor) -> Tensor:
            weight, bias = matrices[gemm], biases[gemm]
            if not is_piece:
                return self._calibrating_forward(x, weight, bias, gemm) if calibrating else F.linear(x, weight, bias)
            if calibrating:
                self._observe(gemm, x, weight)
            y = self._multiply(("column", "row")[gemm], x, weight, bias, products[gemm], dtype)
            return self._observed(gemm, y) if calibrating else y

        y, normalized = self._step_by_step(x, multiply, calibrating)
        bias = self._returned_bias(self.fc2_bias, "row") if self.return_bias else None
        return self._returned(y, bias, normalized if self.return_layernorm_output else None)

    _forward_of_piece = torch.compiler.disable(_forward)

    def _fused(
        self,
        x: Tensor,
        weights: tuple[Tensor, Tensor],
        biases: tuple[Any, Any],
        context: FP8Context,
        is_first_microbatch: bool | None,
    ) -> tuple[Tensor, Tensor | None]:
        """y, and the norm's output with ``return_layernorm_output``."""
        parameters = weights[0], biases[0], weights[1], biases[1]
        tensors = x.reshape(-1, self.hidden_size), self.layer_norm_weight, self.layer_norm_bias, *parameters
        products, dtype = self._products(x, weights, tensors, context, is_first_microbatch)
        fc1, fc2 = products
        self._refuse_backward_override(fc1, "LayerNormMLP; use LayerNormLinear, an activation and Linear")
        if self.activation in ops.ACTIVATIONS:
            mlp = MLP(self.norm, self.activation, fc1, fc2, dtype, self.checkpoint, self.return_layernorm_output)
            return self._shaped(LayerNormMLPFunction.apply(mlp, *detached(*tensors)), x.shape)

        def multiply(gemm: int, x: Tensor) -> Tensor:
            rows = x.reshape(-1, x.shape[-1]).to(dtype)
            return self._multiplied(rows, weights[gemm], biases[gemm], products[gemm], dtype)

        y, normalized = self._step_by_step(x, multiply)
        return y.view(*x.shape[:-1], self.hidden_size), normalized

    def _step_by_step(
        self, x: Tensor, multiply: Callable[[int, Tensor], Tensor], calibrating: bool = False
    ) -> tuple[Tensor, Tensor]:
        """y and the norm's output. ``multiply`` computes the product of the first or the second linear layer, 0 or 1.

        With ``checkpoint``, the backward pass computes all again, but not if ``calibrating`` observes the tensors.
        """

        def computed(x: Tensor) -> tuple[Tensor, Tensor]:
            normalized = self._normalized(x)
            return multiply(1, self.activate(multiply(0, normalized))), normalized

        if calibrating or not (self.checkpoint and torch.is_grad_enabled()):
            return computed(x)
        both: tuple[Tensor, Tensor] = checkpoint(computed, x, use_reentrant=False, preserve_rng_state=False)
        return both

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"bias={self.fc1_bias is not None}, activation={self.activation!r}, norm={self.norm}"
        )
