/* Accesses of different blocks to the same bytes of global memory, in one launch.
 *
 * Blocks run in any order: two accesses, one of them a write and not both atomic, race unless the first block released
 * after its access and the second one acquired before its access. Blocks of a cluster count as one. Releases and acquires
 * are not matched: a fence without a counterpart may hide a race, but ordered accesses are never reported.
 */
#include "races.h"
#include <stdio.h>
#include <stdlib.h>

#define OWNER_BITS 20
#define OWNER_MASK ((1u << OWNER_BITS) - 1)
#define LARGEST_ERA 2047u
#define IS_ATOMIC (1u << 31)
#define SEVERAL OWNER_MASK      /* readers */
#define LARGEST_REGION (1u << 30) /* bytes; races in larger tensors are not checked */

/* The state of a byte. An entry is a cluster's number plus 1, and its number of releases at the access. */
typedef struct {
    u32 write, read, strong_read, line;
} Touch;

struct GlobalRaces {
    u32 regions_count, clusters;
    u32 *releases; /* of each cluster */
    Touch **touches;
};

struct GlobalRaces *global_races_new(const Launch *launch, u32 clusters)
{
    if (!launch->races || clusters >= SEVERAL - 1)
        return NULL;
    struct GlobalRaces *races = calloc(1, sizeof *races);
    races->clusters = clusters;
    races->regions_count = launch->regions_count;
    races->releases = calloc(clusters, sizeof(u32));
    races->touches = calloc(launch->regions_count, sizeof *races->touches);
    for (u32 i = 0; i < launch->regions_count; i++)
        if (launch->regions[i].bytes <= LARGEST_REGION)
            races->touches[i] = calloc(launch->regions[i].bytes, sizeof(Touch));
    return races;
}

void global_races_free(struct GlobalRaces *races)
{
    for (u32 i = 0; races && i < races->regions_count; i++)
        free(races->touches[i]);
    if (races) {
        free(races->touches);
        free(races->releases);
    }
    free(races);
}

static Touch *touches_at(const Launch *launch, const struct GlobalRaces *races, u64 address)
{
    for (u32 i = 0; i < races->regions_count; i++) {
        u64 offset = address - launch->regions[i].start;
        if (offset < launch->regions[i].bytes)
            return races->touches[i] ? races->touches[i] + offset : NULL;
    }
    return NULL;
}

static bool is_ordered(const Cluster *cluster, u32 entry)
{
    u32 owner = entry & OWNER_MASK, era = entry >> OWNER_BITS & LARGEST_ERA;
    return cluster->acquired && (owner == SEVERAL || cluster->global_races->releases[owner - 1] > era);
}

static bool races_with(const Cluster *cluster, u32 entry, u32 self)
{
    return entry && (entry & OWNER_MASK) != self && !is_ordered(cluster, entry);
}

__attribute__((noreturn, cold)) static void report(Thread *t, u64 address, const char *does, u32 entry, const char *did,
                                                   u32 line)
{
    char who[40] = "other blocks", where[40] = "";
    u32 owner = entry & OWNER_MASK;
    if (owner != SEVERAL)
        snprintf(who, sizeof who, "%s %u", t->block->cluster->blocks_count > 1 ? "cluster" : "block", owner - 1);
    if (line)
        snprintf(where, sizeof where, " at PTX line %u", line);
    rt_fail(t, "race: global memory at 0x%llx is %s, which %s %s in the same launch%s, and nothing orders the two",
            (unsigned long long)address, does, who, did, where);
}

static void read_byte(Thread *t, const Cluster *cluster, Touch *touch, u64 address, GlobalAccess access, u32 self)
{
    if (access == CONSTANT_READ && touch->write)
        rt_fail(t, "ld.global.nc at 0x%llx of what the same launch wrote at PTX line %u", (unsigned long long)address,
                touch->line);
    bool both_atomic = access == STRONG_READ && touch->write & IS_ATOMIC;
    if (!both_atomic && races_with(cluster, touch->write, self))
        report(t, address, "read", touch->write, "wrote", touch->line);
    u32 *noted = access == STRONG_READ ? &touch->strong_read : &touch->read, reader = *noted & OWNER_MASK;
    *noted = !reader || reader == self ? self | cluster->era << OWNER_BITS : SEVERAL;
}

static void write_byte(Thread *t, const Cluster *cluster, Touch *touch, u64 address, GlobalAccess access, u32 self)
{
    u32 atomic = access == ATOMIC_WRITE ? IS_ATOMIC : 0;
    if (!(atomic & touch->write) && races_with(cluster, touch->write, self))
        report(t, address, "written", touch->write, "wrote", touch->line);
    if (races_with(cluster, touch->read, self))
        report(t, address, "written", touch->read, "read", 0);
    if (!atomic && races_with(cluster, touch->strong_read, self))
        report(t, address, "written", touch->strong_read, "read", 0);
    /* Kept, to be compared with other clusters' atomics. */
    if (atomic && (touch->write & OWNER_MASK) == self && !(touch->write & IS_ATOMIC))
        return;
    touch->write = self | cluster->era << OWNER_BITS | atomic;
    touch->line = t->line;
}

/* `owner`: the number of the accessing cluster. */
void global_access(Thread *t, u32 owner, u64 address, u32 bytes, GlobalAccess access)
{
    const Cluster *cluster = t->block->cluster;
    if (!cluster->global_races)
        return;
    Touch *touches = touches_at(t->launch, cluster->global_races, address);
    for (u32 i = 0; touches && i < bytes; i++) {
        if (access == PLAIN_WRITE || access == ATOMIC_WRITE)
            write_byte(t, cluster, &touches[i], address + i, access, owner + 1);
        else
            read_byte(t, cluster, &touches[i], address + i, access, owner + 1);
    }
}

void rt_global_access(Thread *t, const void *address, u32 bytes, GlobalAccess access)
{
    global_access(t, t->block->cluster->number, (u64)address, bytes, access);
}

/* At the scope of the GPU, or a wider one. */
void rt_global_release(Thread *t)
{
    Cluster *cluster = t->block->cluster;
    if (cluster->global_races && cluster->era < LARGEST_ERA)
        cluster->global_races->releases[cluster->number] = ++cluster->era;
}

void rt_global_acquire(Thread *t)
{
    t->block->cluster->acquired = true;
}
