"""Annotations of a kernel for the compiler: tensor maps passed by value, dynamic shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba.cuda.cgutils import get_or_insert_named_metadata

from cuda_kernels.device.language import i32, i64, void
from cuda_kernels.lowering.compiler import TENSOR_MAP, intrinsic_of, signature


@cache
def grid_constant_params() -> Any:
    """A function whose call in a kernel makes its tensor maps lie in its parameters."""

    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        module, function = builder.module, builder.function
        # NVVM counts parameters from 1, as these places do: the first argument is the address of Numba's own result.
        maps = [index for index, arg in enumerate(function.args) if arg.type == TENSOR_MAP.as_pointer()]
        for index in maps:
            attributes = function.args[index].attributes
            set.add(attributes, "byval ")  # NVVM's dialect spells it without a type
            attributes.align = 64
        indices = module.add_metadata([ir.IntType(32)(index) for index in maps])
        node = module.add_metadata([function, ir.MetaDataString(module, "grid_constant"), indices])
        get_or_insert_named_metadata(module, "nvvm.annotations").add(node)
        return context.get_dummy_value()

    return intrinsic_of("grid_constant_params", 0, lambda typingctx: (signature(void), lower))


@cache
def address_of() -> Any:
    """``map -> int64``."""

    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        return builder.ptrtoint(args[0], ir.IntType(64))

    return intrinsic_of("address_of", 1, lambda typingctx, x: (signature(i64, x), lower))


@cache
def dynamic_shared(alignment: int) -> Any:
    """``() -> int32``: where the block's dynamic shared memory begins, at a multiple of ``alignment`` bytes."""

    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        memory = builder.module.globals.get("dynamic_shared")
        if memory is None:
            memory = ir.GlobalVariable(builder.module, ir.ArrayType(ir.IntType(8), 0), "dynamic_shared", addrspace=3)
            memory.linkage = "external"
            memory.align = alignment
        return builder.ptrtoint(memory, ir.IntType(32))

    return intrinsic_of("dynamic_shared", 0, lambda typingctx: (signature(i32), lower))
