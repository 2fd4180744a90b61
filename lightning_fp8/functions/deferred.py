"""Tensors whose values are computed on first read. FP8 layers do not read them: they read FP8 copies."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_fp8.ops import Quantized
from lightning_fp8.ops.cast import CastArgs
from lightning_fp8.scaled import Cast

_aten = torch.ops.aten
_READ_NO_VALUES = (_aten.new_empty_strided.default, _aten.new_empty.default, _aten.empty_like.default)


class DeferredTensor(torch.Tensor):
    """A tensor that is computed from ``source`` on first read. It has the shape, dtype and device of ``source[0]``.

    All operations that read values, and not only the shape, compute it.

    Attributes:
        what: the name of the tensor in error messages.
        made_of: the name of the tensors of ``source`` in error messages.
    """

    what: ClassVar[str]
    made_of: ClassVar[str]
    _source: tuple[Any, ...]
    _versions: list[int]
    _computed: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, *source: Any) -> Any:
        like = source[0]
        output = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        output._source = source
        output._versions = _versions(source)
        output._computed = None
        return output

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def _compute(self, *source: Any) -> Tensor:
        raise NotImplementedError

    def checked_source(self) -> tuple[Any, ...]:
        """The tensors that it is computed from.

        Raises:
            RuntimeError: If one of them was changed in place.
        """
        if _versions(self._source) != self._versions:
            raise RuntimeError(
                f"{self.what} is read for the first time after {self.made_of} was changed in place, for example by an "
                "optimizer; read it earlier (clone() keeps the values), or convert with fuse=False"
            )
        return self._source

    def computed(self) -> Tensor:
        """The values, as the unconverted modules compute them.

        Raises:
            RuntimeError: See :meth:`checked_source`.
        """
        if self._computed is None:
            with torch.no_grad():
                self._computed = self._compute(*self.checked_source())
        return self._computed

    def data_ptr(self) -> int:
        """The address of the computed values, for kernels of other libraries."""
        return self.computed().data_ptr()

    def tolist(self) -> Any:
        return self.computed().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # type: ignore[no-any-return, no-untyped-call]  # raises torch's error for non-leaf tensors
        return self.computed().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:  # pickles hold the values
        return self.computed().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is _aten.detach.default:
            (output,) = args
            detached = type(output)(*output._source)
            detached._computed = output._computed
            detached._versions = output._versions
            return detached
        if function in _READ_NO_VALUES:
            return function(args[0]._source[0], *args[1:], **(kwargs or {}))
        args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.computed, (args, kwargs or {}))
        return function(*args, **kwargs)


class DeferredGradient(DeferredTensor):
    """A gradient that is cast to FP8 in the pass that computes it, if an FP8 layer is the next to read it."""

    def quantized(self, cast: Cast, args: CastArgs) -> Quantized:
        """The FP8 operands of the float32 values ``[R, K]``, which are not rounded to another dtype first."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        gradient = args[0] if args else None
        if function is _aten.view.default and isinstance(gradient, DeferredGradient):
            size = args[1]
            if size[-1] == gradient.shape[-1]:  # a linear layer flattens leading dimensions
                return type(gradient)(*(_reshaped(x, size) for x in gradient.checked_source()))
        return super().__torch_dispatch__(function, types, args, kwargs)


def _versions(source: tuple[Any, ...]) -> list[int]:
    tensors = (x for x in source if isinstance(x, Tensor))
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _reshaped(x: Any, size: Any) -> Any:
    return x.reshape(size) if isinstance(x, Tensor) else x
