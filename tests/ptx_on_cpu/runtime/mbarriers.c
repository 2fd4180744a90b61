/* mbarrier objects. The 64 bits in shared memory refer to a record here, so that overwriting them is detected. */
#include "races.h"
#include <stdlib.h>

#define RECORDS 256u
#define TAG 0x6d62617272000000ull /* in the upper bits of the word */
#define LARGEST_COUNT ((1u << 20) - 1)
#define LARGEST_BYTES ((1 << 20) - 1)

typedef struct {
    u32 offset, expected, pending;
    s32 bytes;                  /* still expected from copies */
    u32 phase;
    u32 initializer, init_time; /* for the proxy fence after mbarrier.init */
    u32 *arrivals, *completed;  /* clocks: of all arrivals, and at the end of the last phase */
} Mbarrier;

struct MbarrierTable {
    u32 count;
    Mbarrier records[RECORDS];
};

void mbarriers_reset(Block *block)
{
    if (block->mbarriers)
        block->mbarriers->count = 0;
}

void mbarriers_free(Block *block)
{
    if (!block->mbarriers)
        return;
    for (u32 i = 0; i < RECORDS; i++) {
        free(block->mbarriers->records[i].arrivals);
        free(block->mbarriers->records[i].completed);
    }
    free(block->mbarriers);
}

static Mbarrier *record_at(Block *block, u32 offset)
{
    u64 word;
    memcpy(&word, block->shared + offset, sizeof word);
    u32 index = (u32)(word & (RECORDS - 1));
    if ((word & ~(u64)(RECORDS - 1)) != TAG || !block->mbarriers || index >= block->mbarriers->count)
        return NULL;
    Mbarrier *barrier = &block->mbarriers->records[index];
    return barrier->offset == offset ? barrier : NULL;
}


static Mbarrier *live_record(Thread *t, Block *block, u32 offset)
{
    Mbarrier *barrier = record_at(block, offset);
    if (!barrier)
        rt_fail(t, "the mbarrier at byte %u of shared memory was never initialised, or is overwritten", offset);
    return barrier;
}

/* Initializations of this thread are released to threads that it synchronizes with, even by relaxed arrivals. */
void mbarriers_publish(Thread *t)
{
    const struct MbarrierTable *table = t->block->mbarriers;
    for (u32 i = 0; table && i < table->count; i++)
        race_initialized(t, table->records[i].offset, 8);
}

void rt_mbarrier_init(Thread *t, u64 address, u32 count)
{
    Block *block = t->block;
    u32 offset = own_window(t, address, 8, 8);
    if (!count || count > LARGEST_COUNT)
        rt_fail(t, "mbarrier.init with a count of %u", count);
    race_thread(t, block, offset, 8, WRITE);
    trace(t, TRACE_INIT, offset, count, 0, 0);
    if (!block->mbarriers)
        block->mbarriers = calloc(1, sizeof *block->mbarriers);
    Mbarrier *barrier = record_at(block, offset);
    if (!barrier) {
        if (block->mbarriers->count == RECORDS)
            rt_fail(t, "limit of the emulator: %u mbarriers in a block", RECORDS);
        barrier = &block->mbarriers->records[block->mbarriers->count++];
    }
    const Races *races = block->cluster->races;
    if (races && !barrier->arrivals) {
        barrier->arrivals = clock_new(races);
        barrier->completed = clock_new(races);
    }
    clock_clear(races, barrier->arrivals);
    clock_clear(races, barrier->completed);
    barrier->offset = offset;
    barrier->expected = barrier->pending = count;
    barrier->bytes = 0;
    barrier->phase = 0;
    barrier->initializer = (u32)(t - block->cluster->threads);
    barrier->init_time = block->cluster->fences;
    u64 word = TAG | (u64)(barrier - block->mbarriers->records);
    memcpy(block->shared + offset, &word, sizeof word);
    written_through_async_proxy(block, offset, 8);
}

void rt_mbarrier_invalidate(Thread *t, u64 address)
{
    Block *block = t->block;
    u32 offset = own_window(t, address, 8, 8);
    live_record(t, block, offset);
    race_thread(t, block, offset, 8, WRITE);
    memset(block->shared + offset, 0xa5, 8);
}

static void advance(Thread *t, Mbarrier *barrier, u32 arrivals, s32 bytes)
{
    if (arrivals > barrier->pending)
        rt_fail(t, "more arrivals at an mbarrier than its count of %u", barrier->expected);
    barrier->pending -= arrivals;
    barrier->bytes += bytes;
    if (barrier->bytes > LARGEST_BYTES || barrier->bytes < -LARGEST_BYTES)
        rt_fail(t, "an mbarrier expects %d bytes, more than it can count", barrier->bytes);
    t->block->cluster->progress++;
    if (barrier->pending || barrier->bytes)
        return;
    barrier->pending = barrier->expected;
    barrier->phase++;
    if (barrier->arrivals) {
        clock_clear(t->block->cluster->races, barrier->completed);
        clock_join(t->block->cluster->races, barrier->completed, barrier->arrivals);
    }
}

static Block *window(Thread *t, u64 address, bool in_cluster, u32 *offset)
{
    if (in_cluster)
        return shared_window(t, address, 8, 8, offset);
    *offset = own_window(t, address, 8, 8);
    return t->block;
}

/* A release at the scope of a block does not release the thread's writes to other blocks. */
u64 rt_mbarrier_arrive(Thread *t, u64 address, u32 count, u32 expected_bytes, bool in_cluster, Release release)
{
    u32 offset;
    Block *block = window(t, address, in_cluster, &offset);
    Mbarrier *barrier = live_record(t, block, offset);
    race_thread(t, block, offset, 8, READ);
    if (release == RELEASE_CLUSTER || (release == RELEASE_CTA && block == t->block))
        race_release(t, barrier->arrivals);
    else if (release == RELEASE_CTA)
        race_release_reads(t, barrier->arrivals);
    else
        race_release_initialized(t, barrier->arrivals);
    trace(t, TRACE_ARRIVE, offset, block->rank, count, expected_bytes);
    u64 token = barrier->phase & 1;
    advance(t, barrier, 0, (s32)expected_bytes);
    advance(t, barrier, count, 0);
    return token;
}

void rt_mbarrier_expect(Thread *t, u64 address, u32 bytes, bool in_cluster)
{
    u32 offset;
    Block *block = window(t, address, in_cluster, &offset);
    Mbarrier *barrier = live_record(t, block, offset);
    race_thread(t, block, offset, 8, READ);
    advance(t, barrier, 0, (s32)bytes);
}

bool rt_mbarrier_test(Thread *t, u64 address, u32 parity, bool may_block, bool acquire)
{
    Block *block = t->block;
    u32 offset = own_window(t, address, 8, 8);
    Mbarrier *barrier = live_record(t, block, offset);
    race_thread(t, block, offset, 8, READ);
    if ((barrier->phase & 1) != (parity & 1)) {
        trace(t, TRACE_WAIT, offset, parity & 1, 0, 0);
        if (acquire)
            race_acquire(t, barrier->completed);
        return true;
    }
    if (may_block)
        wait_for_change(t, &barrier->phase, barrier->phase, "mbarrier.try_wait");
    else
        rt_spin(t, "mbarrier.test_wait");
    return false; /* as if its time limit had expired: the kernel has to repeat it */
}

/* An asynchronous copy arrived: waiters for the phase are ordered after `copy`. */
void mbarrier_complete(Thread *t, Block *block, u32 offset, u32 bytes, BulkClock copy)
{
    Mbarrier *barrier = live_record(t, block, offset);
    const Thread *initializer = &block->cluster->threads[barrier->initializer];
    bool fenced = initializer->last_barrier_fence > barrier->init_time || t->last_barrier_fence > barrier->init_time;
    if (!fenced && (t->launch->strict || t->block != block))
        rt_fail(t, "no fence.mbarrier_init (or proxy.async) between mbarrier.init at byte %u and a copy's signal",
                offset);
    if (barrier->arrivals)
        race_bulk_known(block->cluster->races, copy, barrier->arrivals);
    advance(t, barrier, 0, -(s32)bytes);
}
