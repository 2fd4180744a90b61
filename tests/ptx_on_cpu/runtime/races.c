#include "races.h"
#include <stdio.h>
#include <stdlib.h>

#define CLOCK_BITS 19
#define CLOCK_MASK ((1u << CLOCK_BITS) - 1)
#define LARGEST_AGENTS (1u << (32 - CLOCK_BITS))
#define BULK_AGENTS 64u

struct Races {
    u32 agents, threads, first_wgmma, first_cp_async, first_bulk, first_initialization;
    u32 reads;          /* where clocks of the threads' reads begin: in clusters behind all others, else they are one */
    u32 length;         /* of a clock */
    u32 warpgroups;     /* of a block */
    u32 base, latest;   /* all clocks of earlier clusters are at most `base`; no clock is above `latest` */
    u32 bulk_copies;    /* started so far */
    u32 *known;         /* [threads][length] */
};

/* An epoch is an agent and its clock at an access; 0 stands for none. */
struct Shadow {
    u32 bytes, warps, slots;
    u32 *writes, *atomics, *lines; /* per byte: the last write, the last atomic, the line of the last write */
    u32 *reads;                    /* per slot and byte: a slot is a warp, a warpgroup, all bulk copies, other blocks */
    u32 *exits;                    /* a clock: what the threads knew that have exited */
};

static u32 epoch(u32 agent, u32 clock)
{
    return agent << CLOCK_BITS | clock;
}

static u32 *known_by(const Thread *t)
{
    Races *races = t->block->cluster->races;
    u32 thread = (u32)(t - t->block->cluster->threads);
    return races->known + (size_t)thread * races->length;
}

static u32 agent_of(const Thread *t)
{
    return (u32)(t - t->block->cluster->threads);
}

static void tick(Thread *t, Races *races, u32 *clock)
{
    if (++*clock <= races->latest)
        return;
    races->latest = *clock;
    if (*clock == CLOCK_MASK)
        rt_fail(t, "limit of the emulator: more than %u synchronisations; launch with races=False", CLOCK_MASK);
}

static struct Shadow *shadow_new(const Cluster *cluster, const Races *races, u32 bytes)
{
    struct Shadow *shadow = calloc(1, sizeof *shadow);
    shadow->bytes = bytes;
    shadow->warps = (cluster->threads_count / cluster->blocks_count + WARP - 1) / WARP;
    shadow->slots = shadow->warps + races->warpgroups + 2;
    shadow->writes = calloc(bytes, sizeof(u32));
    shadow->atomics = calloc(bytes, sizeof(u32));
    shadow->lines = calloc(bytes, sizeof(u32));
    shadow->reads = calloc((size_t)bytes * shadow->slots, sizeof(u32));
    shadow->exits = clock_new(races);
    return shadow;
}

Races *races_new(Cluster *cluster)
{
    Races *races = calloc(1, sizeof *races);
    u32 threads = cluster->threads_count / cluster->blocks_count;
    races->threads = cluster->threads_count;
    races->warpgroups = (threads + WARPGROUP - 1) / WARPGROUP;
    races->first_wgmma = races->threads;
    races->first_cp_async = races->first_wgmma + races->warpgroups * cluster->blocks_count;
    races->first_bulk = races->first_cp_async + (cluster->launch->uses_cp_async ? races->threads : 0);
    races->first_initialization = races->first_bulk + BULK_AGENTS;
    races->agents = races->first_initialization + cluster->blocks_count;
    races->reads = cluster->blocks_count > 1 ? races->agents : 0;
    races->length = races->reads + (races->reads ? races->threads : races->agents);
    races->known = calloc((size_t)races->threads * races->length, sizeof(u32));
    for (u32 i = 0; i < cluster->blocks_count; i++) {
        Block *block = &cluster->blocks[i];
        block->shadow = shadow_new(cluster, races, block->shared_bytes);
    }
    return races;
}

static void shadow_clear(struct Shadow *shadow)
{
    memset(shadow->writes, 0, shadow->bytes * sizeof(u32));
    memset(shadow->atomics, 0, shadow->bytes * sizeof(u32));
    memset(shadow->reads, 0, (size_t)shadow->bytes * shadow->slots * sizeof(u32));
}

/* Clocks go on from block to block: whatever earlier blocks did is known to all, and their shadow needs no clearing. */
void races_begin_cluster(Cluster *cluster)
{
    Races *races = cluster->races;
    if (races->agents > LARGEST_AGENTS)
        rt_fail(&cluster->threads[0], "limit of the emulator: too many threads for races; launch with races=False");
    if (races->latest > CLOCK_MASK / 2) {
        for (u32 i = 0; i < cluster->blocks_count; i++)
            shadow_clear(cluster->blocks[i].shadow);
        races->latest = 0;
    }
    races->base = races->latest + 1;
    races->latest = races->base + 1;
    races->bulk_copies = 0;
    for (u32 i = 0; i < cluster->blocks_count; i++)
        clock_clear(races, cluster->blocks[i].shadow->exits);
    for (u32 i = 0; i < races->threads; i++) {
        u32 *known = races->known + (size_t)i * races->length;
        for (u32 k = 0; k < races->length; k++)
            known[k] = races->base;
        known[i] = known[races->reads + i] = races->base + 1;
    }
}

void races_free(Cluster *cluster)
{
    for (u32 i = 0; i < cluster->blocks_count; i++) {
        struct Shadow *shadow = cluster->blocks[i].shadow;
        if (!shadow)
            continue;
        free(shadow->writes);
        free(shadow->atomics);
        free(shadow->lines);
        free(shadow->reads);
        free(shadow->exits);
        free(shadow);
    }
    if (cluster->races)
        free(cluster->races->known);
    free(cluster->races);
}

u32 *clock_new(const Races *races)
{
    return races ? calloc(races->length, sizeof(u32)) : NULL;
}

void clock_clear(const Races *races, u32 *clock)
{
    if (races)
        memset(clock, 0, races->length * sizeof(u32));
}

static void join_part(u32 *into, const u32 *from, u32 first, u32 last)
{
    for (u32 i = first; i < last; i++)
        into[i] = into[i] > from[i] ? into[i] : from[i];
}

void clock_join(const Races *races, u32 *into, const u32 *from)
{
    if (races)
        join_part(into, from, 0, races->length);
}

void clock_meet(const Races *races, u32 *into, const u32 *from)
{
    for (u32 i = 0; i < races->length; i++)
        into[i] = into[i] < from[i] ? into[i] : from[i];
}

static void tick_thread(Thread *t, Races *races)
{
    u32 *known = known_by(t);
    tick(t, races, &known[agent_of(t)]);
    known[races->reads + agent_of(t)] = known[agent_of(t)];
}

void race_release(Thread *t, u32 *into)
{
    Races *races = t->block->cluster->races;
    if (!races)
        return;
    clock_join(races, into, known_by(t));
    tick_thread(t, races);
}

void race_release_reads(Thread *t, u32 *into)
{
    Races *races = t->block->cluster->races;
    if (!races)
        return;
    join_part(into, known_by(t), races->first_wgmma, races->first_cp_async);
    join_part(into, known_by(t), races->first_bulk, races->length);
    tick_thread(t, races);
}

void race_release_initialized(Thread *t, u32 *into)
{
    const Races *races = t->block->cluster->races;
    if (races)
        join_part(into, known_by(t), races->first_initialization, races->agents);
}

void race_initialized(Thread *t, u32 offset, u32 bytes)
{
    Races *races = t->block->cluster->races;
    if (!races)
        return;
    struct Shadow *shadow = t->block->shadow;
    u32 agent = races->first_initialization + t->block->rank;
    u32 *clock = &known_by(t)[agent];
    tick(t, races, clock);
    for (u32 byte = offset; byte < offset + bytes; byte++)
        if (shadow->writes[byte] >> CLOCK_BITS == agent_of(t))
            shadow->writes[byte] = epoch(agent, *clock);
}

void race_acquire(Thread *t, const u32 *from)
{
    Races *races = t->block->cluster->races;
    if (races)
        clock_join(races, known_by(t), from);
}

const u32 *race_knowledge(Thread *t)
{
    return t->block->cluster->races ? known_by(t) : NULL;
}

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

/* Who accesses: what it knows to have happened before, and where its reads are noted. */
typedef struct {
    u32 agent, clock, slot;
    const u32 *known;
    const u8 *stored, *present; /* of an st: the bytes it writes, and those it finds */
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

/* The same of a read. */
static bool unordered_read(const Races *races, Actor actor, u32 earlier)
{
    u32 agent = earlier >> CLOCK_BITS;
    return (earlier & CLOCK_MASK) > actor.known[agent < races->threads ? races->reads + agent : agent];
}

/* Threads that hold copies of one value may all store it: at one instruction, the same bytes at the same place. */
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
