"""Annotations of a kernel for the compiler: tensor maps passed by value, dynamic shared memory."""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba.cuda.cgutils import get_or_insert_named_metadata

from cuda_kernels.device.language import i32, i64, tensor_map, void
from cuda_kernels.lowering.compiler import I32, I64, TENSOR_MAP, generated


@cache
def grid_constant_params() -> Any:
    """A function whose call in a kernel makes its tensor maps lie in its parameters."""

    def emit(builder: Any) -> None:
        module, function = builder.module, builder.function
        # NVVM counts parameters from 1, as these places do: the first argument is the address of Numba's own result.
        maps = [index for index, arg in enumerate(function.args) if arg.type == TENSOR_MAP.as_pointer()]
        for index in maps:
            attributes = function.args[index].attributes
            set.add(attributes, "byval ")  # NVVM's dialect spells it without a type
            attributes.align = 64
        indices = module.add_metadata([I32(index) for index in maps])
        node = module.add_metadata([function, ir.MetaDataString(module, "grid_constant"), indices])
        get_or_insert_named_metadata(module, "nvvm.annotations").add(node)

    return generated(emit, void)


@cache
def address_of() -> Any:
    """``map -> int64``."""

    def emit(builder: Any, tensor_map: Any) -> Any:
        return builder.ptrtoint(tensor_map, I64)

    return generated(emit, i64, tensor_map)


@cache
def dynamic_shared(alignment: int) -> Any:
    """``() -> int32``: where the block's dynamic shared memory begins, at a multiple of ``alignment`` bytes."""

    def emit(builder: Any) -> Any:
        memory = builder.module.globals.get("dynamic_shared")
        if memory is None:
            memory = ir.GlobalVariable(builder.module, ir.ArrayType(ir.IntType(8), 0), "dynamic_shared", addrspace=3)
            memory.linkage = "external"
            memory.align = alignment
        return builder.ptrtoint(memory, I32)

    return generated(emit, i32)
