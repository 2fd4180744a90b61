/* Clocks: allocation, joins, and releases and acquires of threads. */
#include "clocks.h"
#include <stdlib.h>

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

/* Clocks are not reset between blocks: all threads are ordered after earlier blocks, and the shadow is not cleared. */
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
