"""Matrices that take part in products but are no linear layer's weight, and why they do not run in FP8."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from lightning_fp8.convert.layers.linears import is_linear
from lightning_fp8.convert.summary import LayerDecision

# Parts of the names of what is looked up, added or scaled by; a product has other names, or says that it is one.
_NO_MATRIX = re.compile(
    r"bias(es)?|pos(ition\w*|emb\w*)?|tokens?|tables?|masks?|latents?|prompts?|log|scales?|gammas?|betas?|\w*norm|"
    r"init(ial)?|means?|stds?"
)
_LOOKED_UP = re.compile(r"emb(ed\w*)?")
# ... and what a layer computes its weight from, which is in the table as the layer.
_NOTHING_TO_LIST = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.PReLU,
    ParametrizationList,
)


def other_matrices(module: nn.Module, name: str) -> Iterator[LayerDecision]:
    """The matrices among the parameters of ``module``, called ``name``, that are not the weight of a linear layer."""
    if isinstance(module, _NOTHING_TO_LIST):
        return
    if isinstance(module, nn.modules.conv._ConvNd) and not _is_depthwise(module) and not is_lazy(module.weight):
        yield _decision(name, module.weight, "convolution", _convolution(module))
    is_layer = is_linear(module) or isinstance(module, nn.modules.conv._ConvNd)
    for parameter_name, parameter in module.named_parameters(recurse=False):
        if is_lazy(parameter) or (is_layer and (parameter_name == "weight" or parameter_name in _own_names(module))):
            continue
        if _is_matrix(name, parameter_name, parameter):
            yield _decision(
                f"{name}.{parameter_name}" if name else parameter_name,
                parameter,
                *_kind_and_reason(module, parameter_name, parameter),
            )


def _decision(name: str, parameter: Tensor, kind: str, reason: str) -> LayerDecision:
    return LayerDecision(name, tuple(parameter.shape), False, reason, kind, parameter.numel())


def _own_names(module: nn.Module) -> tuple[str, ...]:
    return getattr(module, "weight_names", ())


def _is_matrix(name: str, parameter_name: str, parameter: Tensor) -> bool:
    if not parameter.is_floating_point() or sum(size > 1 for size in parameter.shape) < 2:
        return False
    # A ParameterList numbers its own.
    said = name.rpartition(".")[2] if parameter_name.isdecimal() else parameter_name
    parts = said.lower().split("_")
    if any(map(_LOOKED_UP.fullmatch, parts)):
        return False
    if parts[0] == "w" or parts[-1] in ("weight", "proj", "projection"):
        return True
    return parts[-1] not in ("query", "queries") and not any(map(_NO_MATRIX.fullmatch, parts))


def _kind_and_reason(module: nn.Module, parameter_name: str, parameter: Tensor) -> tuple[str, str]:
    cls = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        return "attention", "nn.MultiheadAttention multiplies by a parameter of its own"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "recurrent", f"nn.{cls}'s products do not run in FP8"
    if parameter.dim() > 2 and ("expert" in cls.lower() or "moe" in cls.lower()):
        return "experts", f"{parameter.dim()}-D parameter of {cls}: products of experts do not run in FP8"
    return "parameter", f"{cls} multiplies by a parameter of its own, not by a linear layer"


def _is_depthwise(module: nn.modules.conv._ConvNd) -> bool:
    """Whether each channel is convolved by itself, which is no product of matrices."""
    return module.groups == module.in_channels and module.groups > 1


def _convolution(module: nn.modules.conv._ConvNd) -> str:
    size = " × ".join(map(str, module.kernel_size))
    instead = "; the same as an nn.Linear would" if math.prod(module.kernel_size) == 1 and module.groups == 1 else ""
    return f"a convolution of {size} does not run in FP8{instead}"
