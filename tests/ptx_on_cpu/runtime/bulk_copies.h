/* A bulk copy in flight: shared by loads, stores and the order of their arrival. */
#pragma once
#include "races.h"
#include "tensor_map.h"

#define LARGEST_VALUE 16

/* A load arrives as a whole. A store first reads shared memory, and writes global memory later. */
struct Copy {
    Copy *previous, *next;
    Thread *thread;
    BulkClock clock;
    enum { TENSOR_LOAD, TENSOR_STORE, BYTES_LOAD, BYTES_STORE, BETWEEN_BLOCKS, VALUE } kind;
    Box box;                    /* of a tensor copy; box.shared is the offset of others too */
    u8 *global;                 /* of a copy of bytes */
    u32 bytes;
    Block *block;               /* of the shared memory that a store reads, or that a load to one block writes */
    u16 targets;                /* loads: ranks of the blocks that receive */
    u32 mbarrier;               /* its offset in each of them */
    Block *mbarrier_block;      /* for one target */
    const u8 *source;           /* BETWEEN_BLOCKS */
    u8 value[LARGEST_VALUE];    /* VALUE */
    bool add;                   /* stores */
    u32 group;
    bool waited;
    u8 *staged;                 /* the bytes that a store has read */
    u32 owner;                  /* the number of its cluster */
};

static inline bool is_store(const Copy *copy)
{
    return copy->kind == TENSOR_STORE || copy->kind == BYTES_STORE;
}

static inline bool is_tensor(const Copy *copy)
{
    return copy->kind == TENSOR_LOAD || copy->kind == TENSOR_STORE;
}

/* The position in shared memory of byte `offset` of the copy. */
static inline u32 place(const Copy *copy, u32 offset)
{
    return is_tensor(copy) ? swizzled(&copy->box.map, copy->box.shared + offset) : copy->box.shared + offset;
}

static inline u32 piece(const Copy *copy, u32 offset)
{
    return copy->bytes - offset < CHUNK ? copy->bytes - offset : CHUNK;
}

/* bulk_copies.c: those in flight, oldest first. */
Copy *bulk_add(const Copy *description);
void bulk_unlink(Cluster *cluster, Copy *copy);
void bulk_remove(Copy *copy);

/* bulk_loads.c */
void bulk_load_lands(Copy *copy);

/* bulk_stores.c */
void bulk_stage(Copy *copy);
void bulk_store_lands(Copy *copy);
