"""How a block finds its tile: an entry of a table that the host made."""

from __future__ import annotations

from cuda_kernels.device.language import device, i32, i64
from cuda_kernels.device.ptx import load_16_if
from cuda_kernels.device.sm90 import shfl_sync_0


@device
def load_tile(table, index):
    """Entry ``index`` of the table of tiles: twelve int32, of :data:`cuda_kernels.attention.spec.TILE_FIELDS`.

    They are the same in all threads, and the compiler is told so: loops over tiles are uniform.
    """
    address = table + i64(index) * 48
    a, b, c = load_16_if(address, True), load_16_if(address + 16, True), load_16_if(address + 32, True)
    return (
        shfl_sync_0(i32(a[0])), shfl_sync_0(i32(a[1])), shfl_sync_0(i32(a[2])), shfl_sync_0(i32(a[3])),
        shfl_sync_0(i32(b[0])), shfl_sync_0(i32(b[1])), shfl_sync_0(i32(b[2])), shfl_sync_0(i32(b[3])),
        shfl_sync_0(i32(c[0])), shfl_sync_0(i32(c[1])), shfl_sync_0(i32(c[2])), shfl_sync_0(i32(c[3])),
    )  # fmt: skip
