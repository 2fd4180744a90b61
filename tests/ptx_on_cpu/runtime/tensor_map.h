/* The emulator's own encoding of a tensor map, written by tensor_map.py. Dimensions are innermost first. */
#pragma once
#include "internal.h"

#define TENSOR_MAP_MAGIC 0x70616d726f736e74ull
#define CHUNK 16u /* bytes that a swizzle moves together */

typedef struct {
    u64 magic, address;
    u64 strides[4]; /* in bytes, of dimensions 1 to 4 */
    u32 extents[5];
    u16 box[5];
    u8 element_bytes, rank;
    u8 swizzle; /* 0 none, 1 32 bytes, 2 64 bytes, 3 128 bytes */
    u8 is_float32, writable;
} TensorMap;
_Static_assert(sizeof(TensorMap) <= 128, "a tensor map has 128 bytes");

/* Up to 16 bytes of a box, of which `first` to `last` are inside the tensor. */
typedef struct {
    u32 shared; /* offset from the box's start, before the swizzle */
    u8 *global; /* the address of byte 0, which may be outside the tensor */
    u32 first, last;
} Chunk;

typedef struct {
    TensorMap map;
    s32 corner[5];
    u32 shared; /* offset of the box in shared memory */
} Box;

TensorMap read_tensor_map(Thread *t, u64 address, u32 rank, u64 shared);
u32 box_bytes(const TensorMap *map);
Chunk box_chunk(const Box *box, u32 index);
u32 swizzled(const TensorMap *map, u32 offset);
