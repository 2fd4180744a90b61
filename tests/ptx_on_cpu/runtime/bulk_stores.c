/* Bulk copies from shared memory to global memory, in groups. */
#include "bulk_copies.h"
#include <stdlib.h>

void bulk_stage(Copy *copy)
{
    if (copy->staged)
        return;
    copy->staged = malloc(copy->bytes);
    for (u32 offset = 0; offset < copy->bytes; offset += CHUNK)
        memcpy(copy->staged + offset, copy->block->shared + place(copy, offset), piece(copy, offset));
}

static void put(u8 *target, const u8 *source, u32 bytes, bool add)
{
    if (!add) {
        memcpy(target, source, bytes);
        return;
    }
    for (u32 i = 0; i < bytes; i += sizeof(float)) {
        float sum, term;
        memcpy(&sum, target + i, sizeof sum);
        memcpy(&term, source + i, sizeof term);
        sum += term;
        memcpy(target + i, &sum, sizeof sum);
    }
}

/* Writes global memory; afterwards only the copy's group is needed. */
void bulk_store_lands(Copy *copy)
{
    if (!copy->bytes)
        return;
    bulk_stage(copy);
    for (u32 offset = 0; offset < copy->bytes; offset += CHUNK) {
        Chunk chunk = {.global = copy->global + offset, .last = CHUNK};
        if (copy->kind == TENSOR_STORE)
            chunk = box_chunk(&copy->box, offset / CHUNK);
        if (chunk.last <= chunk.first)
            continue;
        u8 *target = chunk.global + chunk.first;
        u32 bytes = chunk.last - chunk.first;
        global_access(copy->thread, copy->owner, (u64)target, bytes, copy->add ? ATOMIC_WRITE : PLAIN_WRITE);
        put(target, copy->staged + offset + chunk.first, bytes, copy->add);
    }
    copy->bytes = 0;
}

static void start_store(Copy *description)
{
    Thread *t = description->thread;
    description->clock = race_bulk_start(t);
    description->group = t->bulk_groups;
    for (u32 offset = 0; offset < description->bytes; offset += CHUNK) {
        check_proxy_fence(t, description->block, place(description, offset), CHUNK, "a bulk store");
        race_bulk(t, description->clock, description->block, place(description, offset), CHUNK, READ);
    }
    Copy *copy = bulk_add(description);
    if (t->launch->copies == 0)
        bulk_store_lands(copy);
}

void rt_tensor_store(Thread *t, u64 map, const s32 *corner, u32 rank, u64 source, bool add)
{
    Copy copy = {.thread = t, .kind = TENSOR_STORE, .add = add};
    copy.box.map = read_tensor_map(t, map, rank, source);
    memcpy(copy.box.corner, corner, rank * sizeof *corner);
    copy.bytes = box_bytes(&copy.box.map);
    copy.block = t->block;
    copy.box.shared = own_window(t, source, copy.bytes, 1);
    if (!copy.box.map.writable)
        rt_fail(t, "a bulk store to a tensor that is read-only");
    if (add && !copy.box.map.is_float32)
        rt_fail(t, "limit of the emulator: cp.reduce.async.bulk.tensor on elements other than float32");
    start_store(&copy);
}

void rt_bulk_store(Thread *t, u64 target, u64 source, u32 bytes, bool add)
{
    u32 hit = 0;
    if ((target | bytes) % CHUNK)
        rt_fail(t, "cp.async.bulk of %u bytes to address 0x%llx: not multiples of 16",
                bytes, (unsigned long long)target);
    check_global(t, target, bytes, WRITE, &hit);
    Copy copy = {.thread = t, .kind = BYTES_STORE, .add = add, .bytes = bytes, .global = (u8 *)target};
    copy.block = t->block;
    copy.box.shared = own_window(t, source, bytes, CHUNK);
    start_store(&copy);
}

void rt_bulk_commit(Thread *t)
{
    t->bulk_groups++;
}

void rt_bulk_wait(Thread *t, u32 pending, bool read)
{
    Copy *next;
    for (Copy *copy = t->block->cluster->first_copy; copy; copy = next) {
        next = copy->next;
        if (copy->thread != t || !is_store(copy) || copy->group + pending >= t->bulk_groups)
            continue;
        race_bulk_done(t, copy->clock);
        copy->waited = true;
        if (read && copy->bytes)
            bulk_stage(copy);
        if (!read)
            bulk_store_lands(copy);
        if (!copy->bytes)
            bulk_remove(copy);
    }
}
