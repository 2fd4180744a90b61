/* Bulk copies: cp.async.bulk, of tensors and of bytes, and st.async. Loads signal an mbarrier, stores form groups. */
#include "races.h"
#include "tensor_map.h"
#include <stdlib.h>

#define LARGEST_VALUE 16

/* A load lands as a whole. A store first reads shared memory, and writes global memory some time after. */
struct Copy {
    Copy *previous, *next;
    Thread *thread;
    BulkClock clock;
    enum { TENSOR_LOAD, TENSOR_STORE, BYTES_LOAD, BYTES_STORE, BETWEEN_BLOCKS, VALUE } kind;
    Box box;                    /* of a tensor copy; box.shared is the offset of others too */
    u8 *global;                 /* of a copy of bytes */
    u32 bytes;
    Block *block;               /* whose shared memory a store reads, or a load to one block fills */
    u16 targets;                /* loads: ranks of the blocks that receive */
    u32 mbarrier;               /* its offset in each of them */
    Block *mbarrier_block;      /* for one target */
    const u8 *source;           /* BETWEEN_BLOCKS */
    u8 value[LARGEST_VALUE];    /* VALUE */
    bool add;                   /* stores */
    u32 group;
    bool waited;
    u8 *staged;                 /* what a store has read */
    u32 owner;                  /* the number of its cluster */
};

static bool is_store(const Copy *copy)
{
    return copy->kind == TENSOR_STORE || copy->kind == BYTES_STORE;
}

static bool is_tensor(const Copy *copy)
{
    return copy->kind == TENSOR_LOAD || copy->kind == TENSOR_STORE;
}

/* The bytes of shared memory from `offset` on, as the copy lays them out there. */
static u32 place(const Copy *copy, u32 offset)
{
    return is_tensor(copy) ? swizzled(&copy->box.map, copy->box.shared + offset) : copy->box.shared + offset;
}

static u32 piece(const Copy *copy, u32 offset)
{
    return copy->bytes - offset < CHUNK ? copy->bytes - offset : CHUNK;
}

static void unlink_copy(Cluster *cluster, Copy *copy)
{
    *(copy->previous ? &copy->previous->next : &cluster->first_copy) = copy->next;
    *(copy->next ? &copy->next->previous : &cluster->last_copy) = copy->previous;
}

static void remove_copy(Copy *copy)
{
    unlink_copy(copy->thread->block->cluster, copy);
    free(copy->staged);
    free(copy);
}

static Copy *add_copy(const Copy *description)
{
    Cluster *cluster = description->thread->block->cluster;
    Copy *copy = malloc(sizeof *copy);
    *copy = *description;
    copy->owner = cluster->number;
    copy->previous = cluster->last_copy;
    copy->next = NULL;
    *(cluster->last_copy ? &cluster->last_copy->next : &cluster->first_copy) = copy;
    cluster->last_copy = copy;
    cluster->progress++;
    return copy;
}

/* Loads */

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

static void land_load(Copy *copy)
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
    remove_copy(copy);
}

/* Where a load goes: one block, or the same offset in each block of a mask. */
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
    for (u32 rank = 0; rank < cluster->blocks_count; rank++) {
        if (!(description->targets >> rank & 1))
            continue;
        Block *block = block_of_rank(t, rank);
        for (u32 offset = 0; offset < description->bytes; offset += CHUNK)
            race_bulk(t, description->clock, block, place(description, offset), piece(description, offset), WRITE);
    }
    Copy *copy = add_copy(description);
    if (t->launch->copies == 0)
        land_load(copy);
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

/* Stores */

static void stage(Copy *copy)
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

/* Writes global memory; afterwards the copy is only kept for its group. */
static void land_store(Copy *copy)
{
    if (!copy->bytes)
        return;
    stage(copy);
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
    Copy *copy = add_copy(description);
    if (t->launch->copies == 0)
        land_store(copy);
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
            stage(copy);
        if (!read)
            land_store(copy);
        if (!copy->bytes)
            remove_copy(copy);
    }
}

/* Scheduling */

/* Nothing else can go on: the oldest load arrives. */
bool bulk_copies_land(Cluster *cluster)
{
    for (Copy *copy = cluster->first_copy; copy; copy = copy->next) {
        if (!is_store(copy)) {
            land_load(copy);
            return true;
        }
    }
    return false;
}

void bulk_copies_at_random(Cluster *cluster)
{
    u32 count = 0;
    for (const Copy *copy = cluster->first_copy; copy; copy = copy->next)
        count++;
    if (!count || random_number(cluster) & 7)
        return;
    Copy *copy = cluster->first_copy;
    for (u64 skip = random_number(cluster) % count; skip; skip--)
        copy = copy->next;
    if (!is_store(copy))
        land_load(copy);
    else if (!copy->staged)
        stage(copy);
    else
        land_store(copy);
}

void bulk_copies_thread_exits(Thread *t)
{
    for (const Copy *copy = t->block->cluster->first_copy; copy; copy = copy->next)
        if (copy->thread == t && is_store(copy) && !copy->waited)
            rt_fail(t, "the thread exits without cp.async.bulk.wait_group for a store from shared memory");
}

/* Other blocks run before the store arrives. */
static void hold(Cluster *cluster, Copy *copy)
{
    stage(copy);
    unlink_copy(cluster, copy);
    copy->next = cluster->held;
    cluster->held = copy;
}

void bulk_copies_end(Cluster *cluster)
{
    while (cluster->first_copy) {
        Copy *copy = cluster->first_copy;
        if (!is_store(copy))
            rt_fail(copy->thread, "the block ends while a bulk load is in flight");
        u32 copies = cluster->launch->copies;
        if (copy->bytes && (copies == 1 || (copies == 2 && random_number(cluster) & 1))) {
            hold(cluster, copy);
            continue;
        }
        land_store(copy);
        remove_copy(copy);
    }
}

/* Only now is what blocks stored without waiting for it certain to be there. */
void bulk_copies_end_of_grid(Cluster *cluster)
{
    for (Copy *copy = cluster->held; copy; copy = copy->next)
        land_store(copy);
}

void bulk_copies_free(Cluster *cluster)
{
    while (cluster->first_copy)
        remove_copy(cluster->first_copy);
    while (cluster->held) {
        Copy *next = cluster->held->next;
        free(cluster->held->staged);
        free(cluster->held);
        cluster->held = next;
    }
}
