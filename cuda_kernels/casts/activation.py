"""Activations, their gradients, and both times a second tensor, as tile loaders, which compute them while loading.

All is computed in float32. Sigmoids are ``1 / (1 + 2**(-z log2 e))`` with the special-function unit's exponential and
reciprocal. If both were correctly rounded, values of SiLU and both GELUs would be within a relative 2e-7 max(1, |z|) of
float64, mostly due to the rounding of the exponent; the unit adds at most 2 and 1 float32 ulps. Values below 1e-36 may
be flushed to zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from cuda_kernels.device.codec import decoded_maxima, quad_decoder, quad_loader, quad_registers
from cuda_kernels.device.language import cuda, device, f32, i64, u32
from cuda_kernels.device.ptx import bits, exp2_approx, load_2_if, load_4_if, reciprocal_approx
from cuda_kernels.device.sizes import ITEM_BYTES, DtypeName
from cuda_kernels.device.tile import OF_TWO, WARP_ROWS, TileLoader

_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)
_MINUS_LOG2_E = np.float32(-math.log2(math.e))
# tanh(u) = 2 sigmoid(2 u) - 1 turns GELU's tanh form, x (1 + tanh(u)) / 2, into x sigmoid(2 u).
_GELU_1 = np.float32(2 * math.sqrt(2 / math.pi))
_GELU_3 = np.float32(2 * math.sqrt(2 / math.pi) * 0.044715)
_GELU_3_SLOPE = np.float32(6 * math.sqrt(2 / math.pi) * 0.044715)
_QGELU = np.float32(1.702)
_FAR, _MINUS_FAR = np.float32(128), np.float32(-128)
"""Beyond these every sigmoid is 0 or 1. Clamping the other factor does not change the product, and avoids 0 * inf."""


@device
def _sigmoid(x):
    return reciprocal_approx(_ONE + exp2_approx(x * _MINUS_LOG2_E))


@device
def _at_least_minus_far(x):
    return _MINUS_FAR if x < _MINUS_FAR else x


@device
def _bounded(x):
    x = _at_least_minus_far(x)
    return _FAR if x > _FAR else x


@device
def _silu(x):
    return _at_least_minus_far(x) * _sigmoid(x)


@device
def _silu_grad_and_value(dy, x):
    s = _sigmoid(x)
    return dy * (s * (_ONE + _bounded(x) * (_ONE - s))), _at_least_minus_far(x) * s


@device
def _gelu_argument(x):
    return x * (_GELU_1 + _GELU_3 * (x * x))


@device
def _gelu(x):
    return _at_least_minus_far(x) * _sigmoid(_gelu_argument(x))


@device
def _gelu_grad_and_value(dy, x):
    s = _sigmoid(_gelu_argument(x))
    near = _bounded(x)
    slope = s * (_ONE + near * (_ONE - s) * (_GELU_1 + _GELU_3_SLOPE * (near * near)))
    return dy * slope, _at_least_minus_far(x) * s


@device
def _qgelu(x):
    return _at_least_minus_far(x) * _sigmoid(_QGELU * x)


@device
def _qgelu_grad_and_value(dy, x):
    s = _sigmoid(_QGELU * x)
    return dy * (s * (_ONE + _QGELU * _bounded(x) * (_ONE - s))), _at_least_minus_far(x) * s


@device
def _sigmoid_grad_and_value(dy, x):
    s = _sigmoid(x)
    return dy * (s * (_ONE - s)), s


@device
def _relu(x):
    return _ZERO if x < _ZERO else x


@device
def _relu_grad_and_value(dy, x):
    return _ZERO if x <= _ZERO else dy, _relu(x)


@device
def _srelu(x):
    x = _relu(x)
    return x * x


@device
def _srelu_grad_and_value(dy, x):
    return _ZERO if x <= _ZERO else dy * (_TWO * x), _srelu(x)


@dataclass(frozen=True)
class Activation:
    """An activation's device functions.

    Attributes:
        forward: ``x -> value``.
        grad_and_value: ``(dy, x) -> (dy times the derivative, value)``.
        gated: whether the second half of a row multiplies the activated first half.
    """

    forward: Any
    grad_and_value: Any
    gated: bool


_FUNCTIONS = {
    ("gelu", "geglu"): (_gelu, _gelu_grad_and_value),
    ("qgelu", "qgeglu"): (_qgelu, _qgelu_grad_and_value),
    ("relu", "reglu"): (_relu, _relu_grad_and_value),
    ("srelu", "sreglu"): (_srelu, _srelu_grad_and_value),
    ("silu", "swiglu"): (_silu, _silu_grad_and_value),
    ("glu",): (_sigmoid, _sigmoid_grad_and_value),
}
ACTIVATIONS = {
    name: Activation(*functions, gated=name.endswith("glu"))
    for names, functions in _FUNCTIONS.items()
    for name in names
}
"""By Transformer Engine's names; ``gelu`` is the tanh form, ``qgelu`` is ``x sigmoid(1.702 x)``."""


def computed_loader(name: str, aligned: bool, num_args: int, raw: int, load_row: Any, compute: Any) -> TileLoader:
    """A loader that computes a tile's values while loading, so that kernels that read them twice compute them once.

    Args:
        name: unique among all loaders.
        aligned: see :func:`~cuda_kernels.device.codec.quad_loader`.
        num_args: number of int64 arguments.
        raw: registers for the inputs of four elements of a row.
        load_row: device function ``(args, columns, row, column, in_bounds, registers, first_register)``.
        compute: device function ``(columns, column, registers, first_register, values)`` for four elements of a row.
    """
    # Rows are loaded in parts, so that the inputs of one part and the values of the others fit into registers.
    parts = 1 if raw <= 4 else 2 if aligned else 4
    together = WARP_ROWS // parts
    in_flight = together * raw
    decode_quad = quad_decoder("float32")

    @device
    def load_rows(args, rows, columns, first_row, column, registers, skipped):
        raw_registers, values = cuda.local.array(in_flight, u32), cuda.local.array(4, f32)
        for step in range(together):
            row_idx = first_row + skipped + step
            load_row(args, columns, row_idx, column, row_idx < rows, raw_registers, step * raw)
        for step in range(together):
            compute(columns, column, raw_registers, step * raw, values)
            for index in range(4):
                registers[4 * (skipped + step) + index] = bits(values[index])

    @device
    def load(args, rows, columns, first_row, column, full_tile, registers):
        load_rows(args, rows, columns, first_row, column, registers, 0)
        if parts > 1:  # a loop would not be unrolled, and a variable index places registers in local memory
            load_rows(args, rows, columns, first_row, column, registers, together)
        if parts > 2:
            load_rows(args, rows, columns, first_row, column, registers, 2 * together)
            load_rows(args, rows, columns, first_row, column, registers, 3 * together)

    @device
    def decode(registers, quad_index):
        return decode_quad(registers, 4 * quad_index)

    min_blocks_per_sm = 2 if raw <= 4 or (aligned and raw <= 6) else 1
    return TileLoader(f"{name}, {aligned=}", num_args, 4 * WARP_ROWS, load, decode, decoded_maxima(), min_blocks_per_sm)


@device
def unpack(quad, values):
    values[0], values[1], values[2], values[3] = quad


@cache
def activation_loader(name: str, dtype: DtypeName, aligned: bool) -> TileLoader:
    """``activation(x)``, or if gated ``activation(x[:, :F]) * x[:, F:]``, with ``[R, F]`` values.

    Arguments: x's address, and the stride of its rows in elements. ``aligned``: address, stride and F are multiples of
    four elements.
    """
    activation = ACTIVATIONS[name]
    forward, gated = activation.forward, activation.gated
    itemsize = ITEM_BYTES[dtype]
    registers_of_quad = quad_registers(dtype)
    load_quad = quad_loader(dtype, aligned)
    decode_quad = quad_decoder(dtype)

    @device
    def load_row(args, columns, row, column, in_bounds, raw_registers, first_register):
        x, stride = args[0], args[1]
        address = x + (row * stride + i64(column)) * itemsize
        loaded = load_quad(address, column, columns, in_bounds)
        for register in range(registers_of_quad):
            raw_registers[first_register + register] = loaded[register]
        if gated:
            loaded = load_quad(address + i64(columns) * itemsize, column, columns, in_bounds)
            for register in range(registers_of_quad):
                raw_registers[first_register + registers_of_quad + register] = loaded[register]

    @device
    def compute(columns, column, raw_registers, first_register, values):
        x, gate = cuda.local.array(4, f32), cuda.local.array(4, f32)
        unpack(decode_quad(raw_registers, first_register), x)
        if gated:
            unpack(decode_quad(raw_registers, first_register + registers_of_quad), gate)
        for index in range(4):
            values[index] = forward(x[index]) * gate[index] if gated else forward(x[index])

    raw = 2 * registers_of_quad if gated else registers_of_quad
    return computed_loader(f"{name} {dtype}", aligned, 2, raw, load_row, compute)


def _wrapped_loader(dtype: DtypeName, aligned: bool) -> Any:
    """A device function ``(address, column, period, columns, in_bounds) -> registers`` for four elements of a row.

    Column ``period + i`` reads element i, so that both halves of a gradient read the same row. ``address``: the row's.
    """
    itemsize = ITEM_BYTES[dtype]
    load_quad = quad_loader(dtype, True)
    load_one = load_2_if if itemsize == 2 else load_4_if

    @device
    def element(column, period):
        return column - period * i64(column >= period)

    @device
    def load_aligned(address, column, period, columns, in_bounds):
        return load_quad(address + element(column, period) * itemsize, column, columns, in_bounds)

    @device
    def load_unaligned(address, column, period, columns, in_bounds):
        loaded = cuda.local.array(4, u32)
        for index in range(4):
            col = column + index
            loaded[index] = load_one(address + element(col, period) * itemsize, in_bounds & (col < columns))
        if itemsize == 4:
            return loaded
        return loaded[0] | loaded[1] << u32(16), loaded[2] | loaded[3] << u32(16)

    return load_aligned if aligned else load_unaligned


@cache
def activation_backward_loader(name: str, dtype: DtypeName, dy_dtype: DtypeName, aligned: bool) -> TileLoader:
    """The gradient of x ``[R, F]``, or if gated ``[R, 2 F]``: the activation's input, then the gate.

    Arguments: x's address and stride, dy's address and stride. ``aligned``: addresses, strides and F are multiples of
    four elements.
    """
    activation = ACTIVATIONS[name]
    grad_and_value, gated = activation.grad_and_value, activation.gated
    itemsize = ITEM_BYTES[dtype]
    registers_of_quad = quad_registers(dtype)
    dy_itemsize = ITEM_BYTES[dy_dtype]
    registers_of_dy_quad = quad_registers(dy_dtype)
    decode_x, decode_dy = quad_decoder(dtype), quad_decoder(dy_dtype)
    load_x, load_dy = _wrapped_loader(dtype, aligned), _wrapped_loader(dy_dtype, aligned)
    load_gate = quad_loader(dtype, aligned)

    @device
    def load_row(args, columns, row, column, in_bounds, raw_registers, first_register):
        period = columns >> 1 if gated else columns
        x, stride, dy, dy_stride = args[0], args[1], args[2], args[3]  # the address of sums may follow
        x_row = x + row * stride * itemsize
        dy_row = dy + row * dy_stride * dy_itemsize
        loaded = load_x(x_row, column, period, columns, in_bounds)
        for register in range(registers_of_quad):
            raw_registers[first_register + register] = loaded[register]
        loaded_dy = load_dy(dy_row, column, period, columns, in_bounds)
        for register in range(registers_of_dy_quad):
            raw_registers[first_register + registers_of_quad + register] = loaded_dy[register]
        if gated:  # the gate is a factor of the first half only
            loaded_gate = load_gate(x_row + i64(period + column) * itemsize, column, period, in_bounds)
            for register in range(registers_of_quad):
                raw_registers[first_register + registers_of_quad + registers_of_dy_quad + register] = loaded_gate[
                    register
                ]

    @device
    def compute(columns, column, raw_registers, first_register, values):
        x = cuda.local.array(4, f32)
        dy = cuda.local.array(4, f32)
        gate = cuda.local.array(4, f32)
        unpack(decode_x(raw_registers, first_register), x)
        unpack(decode_dy(raw_registers, first_register + registers_of_quad), dy)
        if gated:
            unpack(decode_x(raw_registers, first_register + registers_of_quad + registers_of_dy_quad), gate)
        for index in range(4):
            factor = dy[index] * gate[index] if gated else dy[index]
            grad, value = grad_and_value(factor, x[index])
            values[index] = grad if not gated or column + index < columns >> 1 else dy[index] * value

    raw = (2 * registers_of_quad if gated else registers_of_quad) + registers_of_dy_quad
    return computed_loader(f"gradient of {name} {dtype}, {dy_dtype}", aligned, 4, raw, load_row, compute)


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

    return replace(of_x, load=load, tensors=2, addresses=2, own=OF_TWO)
