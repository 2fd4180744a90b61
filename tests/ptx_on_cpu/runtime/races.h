/* Happens-before race detection on shared memory, with vector clocks.
 *
 * An agent is what accesses memory on its own: a thread, the wgmma of a warpgroup, the cp.async of a thread, a bulk
 * copy, or the initialization of a block's mbarriers. Its clock grows with each release (a thread) or each group (an asynchronous agent). A thread knows a clock of
 * every agent: accesses up to there happened before what it does next. Two accesses, not both reads and not both
 * atomic, race when the later one's agent does not know the clock of the earlier one. Bulk copies share a few agents,
 * so that one that nobody waited for may be forgotten; nothing is reported that is ordered.
 */
#pragma once
#include "internal.h"

Races *races_new(Cluster *cluster);
void races_begin_cluster(Cluster *cluster);
void races_free(Cluster *cluster);

/* A clock of every agent, all zero; in clusters, of the reads of every thread besides. */
u32 *clock_new(const Races *races);
void clock_clear(const Races *races, u32 *clock);
void clock_join(const Races *races, u32 *into, const u32 *from);
void clock_meet(const Races *races, u32 *into, const u32 *from);

/* All of these do nothing, and take null clocks, when races are not looked for. */
void race_release(Thread *t, u32 *into);
void race_acquire(Thread *t, const u32 *from);

/* To another block, at the scope of this one: that its reads are done, and the asynchronous copies that it saw arrive,
 * so that their places may be written again. What it wrote itself stays unknown. */
void race_release_reads(Thread *t, u32 *into);

/* fence.mbarrier_init: what the thread wrote there is an access of its block's initialization from here on, and that
 * is known even by an arrival that is relaxed. */
void race_initialized(Thread *t, u32 offset, u32 bytes);
void race_release_initialized(Thread *t, u32 *into);

void race_thread(Thread *t, Block *block, u32 offset, u32 bytes, Access access);

/* Shared memory ends with its block: what other blocks did there has to be known to one of its threads. */
void race_thread_exited(Thread *t);

/* cp.async: a write that is known to be done once the thread has waited for its group. */
void race_cp_async(Thread *t, u32 offset, u32 bytes, u32 group);
void race_cp_async_done(Thread *t, u32 groups);

/* wgmma: a read with what all four warps know, done once a thread has waited for its group. */
void race_wgmma(Thread *t, const u32 *known, u32 offset, u32 bytes, u32 group);
void race_wgmma_done(Thread *t, u32 groups);

/* Bulk copies: `clock` names the copy from its start on. */
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
