/* Accesses to shared memory: each is compared with earlier ones, and recorded. */
#include "clocks.h"
#include <stdio.h>

static void describe(const Cluster *cluster, u32 agent, char *text, size_t size)
{
    const Races *races = cluster->races;
    u32 threads = races->threads / cluster->blocks_count;
    const char *kind = "thread";
    u32 number = agent % threads, rank = agent / threads;
    if (agent >= races->first_initialization) {
        snprintf(text, size, "the initialization of block %u's mbarriers", agent - races->first_initialization);
        return;
    }
    if (agent >= races->first_bulk) {
        snprintf(text, size, "a bulk copy");
        return;
    }
    if (agent >= races->first_cp_async) {
        kind = "cp.async of thread";
        number = (agent - races->first_cp_async) % threads;
        rank = (agent - races->first_cp_async) / threads;
    } else if (agent >= races->first_wgmma) {
        kind = "wgmma of warpgroup";
        number = (agent - races->first_wgmma) % races->warpgroups;
        rank = (agent - races->first_wgmma) / races->warpgroups;
    }
    if (cluster->blocks_count > 1)
        snprintf(text, size, "%s %u of the cluster's block %u", kind, number, rank);
    else
        snprintf(text, size, "%s %u", kind, number);
}

/* An accessing agent: the clocks that happened before, and the slot that records its reads. */
typedef struct {
    u32 agent, clock, slot;
    const u32 *known;
    const u8 *stored, *present; /* of an st: the bytes that it writes, and the bytes before it */
} Actor;

__attribute__((noreturn, cold)) static void report(Thread *t, Actor actor, Access access, u32 byte, u32 earlier,
                                                   const char *did, u32 line)
{
    static const char *const VERBS[] = {"reads", "writes", "updates"};
    char now[80], before[80], where[40] = "";
    describe(t->block->cluster, actor.agent, now, sizeof now);
    describe(t->block->cluster, earlier >> CLOCK_BITS, before, sizeof before);
    if (line)
        snprintf(where, sizeof where, " at PTX line %u", line);
    rt_fail(t, "race: %s %s byte %u of shared memory, which %s %s%s, and nothing orders the two", now, VERBS[access],
            byte, before, did, where);
}

__attribute__((noreturn, cold)) static void report_exit(Thread *t, u32 byte, u32 earlier)
{
    char before[80];
    describe(t->block->cluster, earlier >> CLOCK_BITS, before, sizeof before);
    rt_fail(t, "race: block %u of the cluster exits, and nothing orders that after %s's access to its byte %u",
            t->block->rank, before, byte);
}

static bool unordered(Actor actor, u32 earlier)
{
    return (earlier & CLOCK_MASK) > actor.known[earlier >> CLOCK_BITS];
}

/* The same for a read. */
static bool unordered_read(const Races *races, Actor actor, u32 earlier)
{
    u32 agent = earlier >> CLOCK_BITS;
    return (earlier & CLOCK_MASK) > actor.known[agent < races->threads ? races->reads + agent : agent];
}

/* Threads with copies of one value may all store it: the same bytes to the same address in one instruction. */
static bool repeats(const Thread *t, const struct Shadow *shadow, Actor actor, u32 byte, u32 index)
{
    return actor.stored && shadow->lines[byte] == t->line && actor.stored[index] == actor.present[index];
}

static void check_byte(Thread *t, struct Shadow *shadow, Actor actor, u32 byte, u32 index, Access access)
{
    if (unordered(actor, shadow->writes[byte]) && !repeats(t, shadow, actor, byte, index))
        report(t, actor, access, byte, shadow->writes[byte], "wrote", shadow->lines[byte]);
    if (access != ATOMIC && unordered(actor, shadow->atomics[byte]))
        report(t, actor, access, byte, shadow->atomics[byte], "updated", 0);
    for (u32 slot = 0; access != READ && slot < shadow->slots; slot++) {
        u32 earlier = shadow->reads[(size_t)slot * shadow->bytes + byte];
        if (unordered_read(t->block->cluster->races, actor, earlier))
            report(t, actor, access, byte, earlier, "may still be reading", 0);
    }
}

static void record(Thread *t, struct Shadow *shadow, Actor actor, u32 offset, u32 bytes, Access access)
{
    u32 *reads = shadow->reads + (size_t)actor.slot * shadow->bytes;
    u32 *noted = access == READ ? reads : access == WRITE ? shadow->writes : shadow->atomics;
    for (u32 byte = offset; byte < offset + bytes; byte++) {
        check_byte(t, shadow, actor, byte, byte - offset, access);
        noted[byte] = epoch(actor.agent, actor.clock);
        if (access == WRITE)
            shadow->lines[byte] = t->line;
    }
}

void race_thread(Thread *t, Block *block, u32 offset, u32 bytes, Access access)
{
    struct Shadow *shadow = block->shadow;
    if (!shadow)
        return;
    u32 slot = block == t->block ? t->number / WARP : shadow->slots - 1;
    const u32 *known = known_by(t);
    Actor actor = {agent_of(t), known[agent_of(t)], slot, known};
    if (access == WRITE && t->stored && !t->launch->strict) {
        actor.stored = t->stored;
        actor.present = block->shared + offset;
    }
    record(t, shadow, actor, offset, bytes, access);
}

void race_thread_exited(Thread *t)
{
    Block *block = t->block;
    struct Shadow *shadow = block->shadow;
    if (!shadow || block->cluster->blocks_count == 1)
        return;
    race_release(t, shadow->exits);
    if (block->live)
        return;
    Actor last = {.agent = agent_of(t), .known = shadow->exits};
    const u32 *remote_reads = shadow->reads + (size_t)(shadow->slots - 1) * shadow->bytes;
    for (u32 byte = 0; byte < shadow->bytes; byte++) {
        if (unordered_read(block->cluster->races, last, remote_reads[byte]))
            report_exit(t, byte, remote_reads[byte]);
        if (unordered(last, shadow->writes[byte]))
            report_exit(t, byte, shadow->writes[byte]);
        if (unordered(last, shadow->atomics[byte]))
            report_exit(t, byte, shadow->atomics[byte]);
    }
}

void race_cp_async(Thread *t, u32 offset, u32 bytes, u32 group)
{
    Races *races = t->block->cluster->races;
    if (!races)
        return;
    u32 clock = races->base + group;
    tick(t, races, &clock);
    Actor actor = {races->first_cp_async + agent_of(t), clock, 0, known_by(t)};
    record(t, t->block->shadow, actor, offset, bytes, WRITE);
}

void race_cp_async_done(Thread *t, u32 groups)
{
    Races *races = t->block->cluster->races;
    if (races)
        known_by(t)[races->first_cp_async + agent_of(t)] = races->base + groups;
}

static u32 wgmma_agent(const Thread *t)
{
    const Races *races = t->block->cluster->races;
    return races->first_wgmma + t->block->rank * races->warpgroups + t->number / WARPGROUP;
}

void race_wgmma(Thread *t, const u32 *known, u32 offset, u32 bytes, u32 group)
{
    Races *races = t->block->cluster->races;
    if (!races)
        return;
    u32 clock = races->base + group;
    tick(t, races, &clock);
    struct Shadow *shadow = t->block->shadow;
    Actor actor = {wgmma_agent(t), clock, shadow->warps + t->number / WARPGROUP, known};
    record(t, shadow, actor, offset, bytes, READ);
}

void race_wgmma_done(Thread *t, u32 groups)
{
    Races *races = t->block->cluster->races;
    if (races)
        known_by(t)[wgmma_agent(t)] = races->base + groups;
}

BulkClock race_bulk_start(Thread *t)
{
    Races *races = t->block->cluster->races;
    if (!races)
        return (BulkClock){0, 0};
    u32 number = races->bulk_copies++;
    u32 clock = races->base + number / BULK_AGENTS;
    tick(t, races, &clock);
    return (BulkClock){races->first_bulk + number % BULK_AGENTS, clock};
}

void race_bulk(Thread *t, BulkClock copy, Block *block, u32 offset, u32 bytes, Access access)
{
    struct Shadow *shadow = block->shadow;
    if (!shadow)
        return;
    Actor actor = {copy.agent, copy.clock, shadow->slots - 2, known_by(t)};
    record(t, shadow, actor, offset, bytes, access);
}

void race_bulk_known(const Races *races, BulkClock copy, u32 *clock)
{
    if (races && clock[copy.agent] < copy.clock)
        clock[copy.agent] = copy.clock;
}

void race_bulk_done(Thread *t, BulkClock copy)
{
    Races *races = t->block->cluster->races;
    if (races)
        race_bulk_known(races, copy, known_by(t));
}
