/* Bulk copies of tensors, bytes and values to shared memory. Each signals an mbarrier. */
#include "bulk_copies.h"

static void fill(const Copy *copy, Block *block)
{
    for (u32 offset = 0; offset < copy->bytes; offset += CHUNK) {
        u8 *target = block->shared + place(copy, offset);
        u32 bytes = piece(copy, offset);
        switch (copy->kind) {
        case TENSOR_LOAD: {
            Chunk chunk = box_chunk(&copy->box, offset / CHUNK);
            memset(target, 0, bytes);
            if (chunk.last > chunk.first) {
                rt_global_access(copy->thread, chunk.global + chunk.first, chunk.last - chunk.first, PLAIN_READ);
                memcpy(target + chunk.first, chunk.global + chunk.first, chunk.last - chunk.first);
            }
            break;
        }
        case BYTES_LOAD:
            rt_global_access(copy->thread, copy->global + offset, bytes, PLAIN_READ);
            memcpy(target, copy->global + offset, bytes);
            break;
        case BETWEEN_BLOCKS:
            memcpy(target, copy->source + offset, bytes);
            break;
        default:
            memcpy(target, copy->value + offset, bytes);
        }
        written_through_async_proxy(block, place(copy, offset), bytes);
    }
}

void bulk_load_lands(Copy *copy)
{
    Thread *t = copy->thread;
    Cluster *cluster = t->block->cluster;
    for (u32 rank = 0; rank < cluster->blocks_count; rank++) {
        if (!(copy->targets >> rank & 1))
            continue;
        Block *block = &cluster->blocks[rank];
        Block *signalled = copy->mbarrier_block ? copy->mbarrier_block : block;
        fill(copy, block);
        mbarrier_complete(t, signalled, copy->mbarrier, copy->bytes, copy->clock);
    }
    bulk_remove(copy);
}

/* The targets of a load: one block, or the same offset in each block of a mask. */
static void aim(Copy *copy, u64 target, u64 mbarrier, bool multicast, u16 blocks, u32 alignment)
{
    Thread *t = copy->thread;
    Block *block = shared_window(t, target, copy->bytes, alignment, &copy->box.shared);
    copy->mbarrier_block = shared_window(t, mbarrier, 8, 8, &copy->mbarrier);
    copy->targets = (u16)(1u << block->rank);
    if (multicast) {
        copy->targets = blocks;
        copy->mbarrier_block = NULL;
        if (!blocks || blocks >> block->cluster->blocks_count)
            rt_fail(t, "a multicast to blocks 0x%x of a cluster of %u", blocks, block->cluster->blocks_count);
    }
}

static void start_load(Copy *description)
{
    Thread *t = description->thread;
    Cluster *cluster = t->block->cluster;
    description->clock = race_bulk_start(t);
    trace(t, TRACE_LOAD, description->box.shared, description->bytes, description->mbarrier, description->targets);
    for (u32 rank = 0; rank < cluster->blocks_count; rank++) {
        if (!(description->targets >> rank & 1))
            continue;
        Block *block = block_of_rank(t, rank);
        for (u32 offset = 0; offset < description->bytes; offset += CHUNK)
            race_bulk(t, description->clock, block, place(description, offset), piece(description, offset), WRITE);
    }
    Copy *copy = bulk_add(description);
    if (t->launch->copies == 0)
        bulk_load_lands(copy);
}

void rt_tensor_load(Thread *t, u64 target, u64 map, const s32 *corner, u32 rank, u64 mbarrier, bool multicast,
                    u16 blocks)
{
    Copy copy = {.thread = t, .kind = TENSOR_LOAD};
    copy.box.map = read_tensor_map(t, map, rank, target);
    memcpy(copy.box.corner, corner, rank * sizeof *corner);
    copy.bytes = box_bytes(&copy.box.map);
    aim(&copy, target, mbarrier, multicast, blocks, 1);
    start_load(&copy);
}

void rt_bulk_load(Thread *t, u64 target, u64 source, u32 bytes, u64 mbarrier, bool multicast, u16 blocks)
{
    u32 hit = 0;
    if ((source | bytes) % CHUNK)
        rt_fail(t, "cp.async.bulk of %u bytes from address 0x%llx: not multiples of 16",
                bytes, (unsigned long long)source);
    check_global(t, source, bytes, READ, &hit);
    Copy copy = {.thread = t, .kind = BYTES_LOAD, .bytes = bytes, .global = (u8 *)source};
    aim(&copy, target, mbarrier, multicast, blocks, CHUNK);
    start_load(&copy);
}

void rt_bulk_between_blocks(Thread *t, u64 target, u64 source, u32 bytes, u64 mbarrier)
{
    if (bytes % CHUNK)
        rt_fail(t, "cp.async.bulk of %u bytes, not a multiple of 16", bytes);
    Block *block = t->block;
    u32 offset = own_window(t, source, bytes, CHUNK);
    check_proxy_fence(t, block, offset, bytes, "cp.async.bulk");
    Copy copy = {.thread = t, .kind = BETWEEN_BLOCKS, .bytes = bytes, .source = block->shared + offset};
    aim(&copy, target, mbarrier, false, 0, CHUNK);
    race_bulk(t, race_bulk_start(t), block, offset, bytes, READ);
    start_load(&copy);
}

void rt_store_async(Thread *t, u64 target, const void *value, u32 bytes, u64 mbarrier)
{
    Copy copy = {.thread = t, .kind = VALUE, .bytes = bytes};
    memcpy(copy.value, value, bytes);
    aim(&copy, target, mbarrier, false, 0, bytes);
    start_load(&copy);
}
