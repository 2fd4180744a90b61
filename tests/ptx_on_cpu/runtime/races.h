/* Happens-before race detection on shared memory, with vector clocks.
 *
 * An agent accesses memory independently: a thread, the wgmma of a warpgroup, the cp.async of a thread, a bulk copy, or
 * the initialization of a block's mbarriers. Its clock is incremented by each release (of a thread) or each group (of an
 * asynchronous agent). A thread has a vector of clocks, one for each agent: accesses up to that clock happened before its
 * next one. Two accesses, not both reads and not both atomic, race if the earlier one's clock is above the clock that the
 * later one's agent has of it. Bulk copies share a few agents, so a race with a copy that no thread waited for may be
 * missed; ordered accesses are never reported.
 */
#pragma once
#include "internal.h"

Races *races_new(Cluster *cluster);
void races_begin_cluster(Cluster *cluster);
void races_free(Cluster *cluster);

/* A vector of clocks, all zero: of each agent, and in clusters also of the reads of each thread. */
u32 *clock_new(const Races *races);
void clock_clear(const Races *races, u32 *clock);
void clock_join(const Races *races, u32 *into, const u32 *from);
void clock_meet(const Races *races, u32 *into, const u32 *from);

/* If races are not checked, the functions below do nothing and accept null clocks. */
void race_release(Thread *t, u32 *into);
void race_acquire(Thread *t, const u32 *from);

/* A release to another block at the scope of this block. It orders the thread's reads and the asynchronous copies that
 * it waited for, so that their memory may be overwritten, but not the thread's own writes. */
void race_release_reads(Thread *t, u32 *into);

/* fence.mbarrier_init: the thread's write becomes an access of the agent of its block's initialization, which even a
 * relaxed arrival orders. */
void race_initialized(Thread *t, u32 offset, u32 bytes);
void race_release_initialized(Thread *t, u32 *into);

void race_thread(Thread *t, Block *block, u32 offset, u32 bytes, Access access);

/* Shared memory is freed when its block ends: one of its threads has to be ordered after accesses of other blocks. */
void race_thread_exited(Thread *t);

/* cp.async: a write that is done once the thread has waited for its group. */
void race_cp_async(Thread *t, u32 offset, u32 bytes, u32 group);
void race_cp_async_done(Thread *t, u32 groups);

/* wgmma: a read ordered after `known`, of all four warps, and done once a thread has waited for its group. */
void race_wgmma(Thread *t, const u32 *known, u32 offset, u32 bytes, u32 group);
void race_wgmma_done(Thread *t, u32 groups);

/* Bulk copies: `clock` identifies the copy from its start. */
typedef struct {
    u32 agent, clock;
} BulkClock;
BulkClock race_bulk_start(Thread *t);
void race_bulk(Thread *t, BulkClock copy, Block *block, u32 offset, u32 bytes, Access access);
void race_bulk_known(const Races *races, BulkClock copy, u32 *clock);
void race_bulk_done(Thread *t, BulkClock copy);
const u32 *race_knowledge(Thread *t);

/* mbarriers.c: `bytes` of a copy have arrived. */
void mbarrier_complete(Thread *t, Block *block, u32 offset, u32 bytes, BulkClock copy);
