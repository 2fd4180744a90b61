#include "tensor_map.h"

#define TENSOR_MAP_BYTES 128

/* A map is in the kernel's parameters or in global memory. */
static const u8 *tensor_map_at(Thread *t, u64 address)
{
    u32 hit = 0;
    if (is_parameter(t, address, TENSOR_MAP_BYTES))
        return (const u8 *)address;
    check_global(t, address, TENSOR_MAP_BYTES, READ, &hit);
    return (const u8 *)address;
}

TensorMap read_tensor_map(Thread *t, u64 address, u32 rank, u64 shared)
{
    TensorMap map;
    if (address & 63)
        rt_fail(t, "the tensor map at address 0x%llx is not aligned to 64 bytes", (unsigned long long)address);
    memcpy(&map, tensor_map_at(t, address), sizeof map);
    if (map.magic != TENSOR_MAP_MAGIC)
        rt_fail(t, "there is no tensor map at address 0x%llx", (unsigned long long)address);
    if (map.rank != rank)
        rt_fail(t, "an instruction of %u dimensions with a tensor map of %u", rank, map.rank);
    if (shared & 127)
        rt_fail(t, "the shared address of a tensor copy is not aligned to 128 bytes");
    return map;
}

u32 box_bytes(const TensorMap *map)
{
    u32 bytes = map->element_bytes;
    for (u32 i = 0; i < map->rank; i++)
        bytes *= map->box[i];
    return bytes;
}

static u32 clamp(s64 x, u32 largest)
{
    return x < 0 ? 0 : x > largest ? largest : (u32)x;
}

Chunk box_chunk(const Box *box, u32 index)
{
    const TensorMap *map = &box->map;
    u32 row_chunks = map->box[0] * map->element_bytes / CHUNK;
    u32 row = index / row_chunks;
    s64 byte = (s64)box->corner[0] * map->element_bytes + index % row_chunks * CHUNK;
    s64 row_bytes = (s64)map->extents[0] * map->element_bytes;
    s64 offset = byte;
    bool inside = true;
    for (u32 i = 1; i < map->rank; i++) {
        s64 coordinate = (s64)box->corner[i] + row % map->box[i];
        row /= map->box[i];
        inside &= coordinate >= 0 && coordinate < map->extents[i];
        offset += coordinate * (s64)map->strides[i - 1];
    }
    Chunk chunk = {.shared = index * CHUNK, .global = (u8 *)(map->address + (u64)offset)};
    chunk.first = inside ? clamp(-byte, CHUNK) : 0;
    chunk.last = inside ? clamp(row_bytes - byte, CHUNK) : 0;
    return chunk;
}

/* The swizzle exchanges bits of the address in shared memory. */
u32 swizzled(const TensorMap *map, u32 offset)
{
    u32 address = offset + SHARED_BASE;
    static const u32 masks[] = {0, 1, 3, 7};
    return (address ^ (address >> 7 & masks[map->swizzle]) << 4) - SHARED_BASE;
}
