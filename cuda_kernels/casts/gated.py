"""Activations times a second tensor, and their gradients, as tile loaders."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from cuda_kernels.casts.activation import ACTIVATIONS, computed_loader, unpack
from cuda_kernels.device.codec import quad_decoder, quad_loader, quad_registers
from cuda_kernels.device.language import cuda, device, f32, i64
from cuda_kernels.device.sizes import ITEM_BYTES, DtypeName
from cuda_kernels.device.tile import TileLoader


def _apart_loader(name: str, dtype: DtypeName, aligned: bool, tensors: int, compute_one: Any) -> TileLoader:
    """A loader that applies ``compute_one`` elementwise to two or three tensors ``[R, F]`` of one dtype.

    Arguments: the address and the stride of each tensor. ``aligned``: these and F are multiples of four elements.

    Args:
        name: the name of the function.
        dtype: the dtype of the tensors.
        aligned: see above.
        tensors: 2 or 3.
        compute_one: device function ``(first, second, third) -> value``; with two tensors, third equals second.
    """
    itemsize = ITEM_BYTES[dtype]
    registers_of_quad = quad_registers(dtype)
    load_quad, decode_quad = quad_loader(dtype, aligned), quad_decoder(dtype)
    third = (tensors - 1) * registers_of_quad

    @device
    def load_tensor(address, stride, columns, row, column, in_bounds, raw_registers, first_register):
        loaded = load_quad(address + (row * stride + i64(column)) * itemsize, column, columns, in_bounds)
        for register in range(registers_of_quad):
            raw_registers[first_register + register] = loaded[register]

    @device
    def load_two(args, columns, row, column, in_bounds, raw_registers, first_register):
        first, first_stride, second, second_stride = args
        load_tensor(first, first_stride, columns, row, column, in_bounds, raw_registers, first_register)
        load_tensor(
            second, second_stride, columns, row, column, in_bounds, raw_registers, first_register + registers_of_quad
        )

    @device
    def load_three(args, columns, row, column, in_bounds, raw_registers, first_register):
        first, first_stride, second, second_stride, last, last_stride = args
        pairs = first, first_stride, second, second_stride
        load_two(pairs, columns, row, column, in_bounds, raw_registers, first_register)
        load_tensor(last, last_stride, columns, row, column, in_bounds, raw_registers, first_register + third)

    @device
    def compute(columns, column, raw_registers, first_register, values):
        x, y, z = cuda.local.array(4, f32), cuda.local.array(4, f32), cuda.local.array(4, f32)
        unpack(decode_quad(raw_registers, first_register), x)
        unpack(decode_quad(raw_registers, first_register + registers_of_quad), y)
        unpack(decode_quad(raw_registers, first_register + third), z)
        for index in range(4):
            values[index] = compute_one(x[index], y[index], z[index])

    load_row = load_two if tensors == 2 else load_three
    return computed_loader(f"{name} {dtype}", aligned, 2 * tensors, tensors * registers_of_quad, load_row, compute)


@cache
def gated_loader(name: str, dtype: DtypeName, aligned: bool) -> TileLoader:
    """``activation(x) * factor``; see :func:`_apart_loader`. Arguments: x's address and stride, and the factor's."""
    forward = ACTIVATIONS[name].forward
    return _apart_loader(f"gated {name}", dtype, aligned, 2, device(lambda x, factor, _: forward(x) * factor))


@cache
def gated_backward_loader(name: str, dtype: DtypeName, aligned: bool) -> TileLoader:
    """Two tensors: the gradients of x and of the factor through :func:`gated_loader`.

    Arguments: dy's address and stride, x's, and the factor's.
    """
    grad_and_value = ACTIVATIONS[name].grad_and_value
    gradient = device(lambda dy, x, factor: grad_and_value(dy * factor, x)[0])
    of_x = _apart_loader(f"gradients of gated {name}", dtype, aligned, 3, gradient)
    load_of_x, load_of_factor = of_x.load, gated_loader(name, dtype, aligned).load

    @device
    def load(args, rows, columns, first_row, column, full_tile, registers):
        if cuda.blockIdx.x & 1:
            dy, dy_stride, x, x_stride, _, _ = args
            load_of_factor((x, x_stride, dy, dy_stride), rows, columns, first_row, column, full_tile, registers)
        else:
            load_of_x(args, rows, columns, first_row, column, full_tile, registers)

    return replace(of_x, load=load, tensors=2)
