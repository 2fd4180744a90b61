/* The clocks of agents, and their accesses to each byte of shared memory. */
#pragma once
#include "races.h"

#define CLOCK_BITS 19
#define CLOCK_MASK ((1u << CLOCK_BITS) - 1)
#define LARGEST_AGENTS (1u << (32 - CLOCK_BITS))
#define BULK_AGENTS 64u

struct Races {
    u32 agents, threads, first_wgmma, first_cp_async, first_bulk, first_initialization;
    u32 reads;          /* index of the first clock of the threads' reads: in clusters after all others, else 0 */
    u32 length;         /* of a clock */
    u32 warpgroups;     /* of a block */
    u32 base, latest;   /* all clocks of earlier clusters are at most `base`; no clock is above `latest` */
    u32 bulk_copies;    /* started so far */
    u32 *known;         /* [threads][length] */
};

/* An epoch is an agent and its clock at an access; 0 is none. */
struct Shadow {
    u32 bytes, warps, slots;
    u32 *writes, *atomics, *lines; /* per byte: the last write, the last atomic, the line of the last write */
    u32 *reads;                    /* per slot and byte: a slot is a warp, a warpgroup, all bulk copies, other blocks */
    u32 *exits;                    /* the joined clocks of exited threads */
};

static inline u32 epoch(u32 agent, u32 clock)
{
    return agent << CLOCK_BITS | clock;
}

static inline u32 *known_by(const Thread *t)
{
    Races *races = t->block->cluster->races;
    u32 thread = (u32)(t - t->block->cluster->threads);
    return races->known + (size_t)thread * races->length;
}

static inline u32 agent_of(const Thread *t)
{
    return (u32)(t - t->block->cluster->threads);
}

static inline void tick(Thread *t, Races *races, u32 *clock)
{
    if (++*clock <= races->latest)
        return;
    races->latest = *clock;
    if (*clock == CLOCK_MASK)
        rt_fail(t, "limit of the emulator: more than %u synchronisations; launch with races=False", CLOCK_MASK);
}
