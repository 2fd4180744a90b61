/* The blocks of a cluster and their threads: allocated once for a grid, and reset for each of its clusters. */
#include "races.h"
#include <stdlib.h>

static void begin_thread(Block *block, Thread *t, u32 number)
{
    const Launch *launch = block->cluster->launch;
    struct CopyQueue *copies = t->copies;
    memset(t, 0, sizeof *t);
    t->copies = copies;
    t->launch = launch;
    t->block = block;
    t->warp = &block->warps[number / WARP];
    t->number = number;
    t->lane = number % WARP;
    t->tid[0] = number % launch->block[0];
    t->tid[1] = number / launch->block[0] % launch->block[1];
    t->tid[2] = number / launch->block[0] / launch->block[1];
    t->warp->live |= 1u << t->lane;
    cp_async_reset(t);
}

static void begin_block(Block *block)
{
    /* A value that is large, an unlikely float, and not NaN in any supported format. */
    const u64 garbage = 0x6ba55aa56ba55aa5ull;
    for (u32 i = 0; i < block->shared_bytes; i += sizeof garbage)
        memcpy(block->shared + i, &garbage, sizeof garbage);
    if (block->writers)
        memset(block->writers, 0, block->shared_bytes * sizeof(u32));
    block->live = block->threads_count;
    u32 warps = (block->threads_count + WARP - 1) / WARP;
    for (u32 i = 0; i < warps; i++) {
        Warp *warp = &block->warps[i];
        *warp = (Warp){.block = block, .id = i, .meetings = warp->meetings};
    }
    for (u32 i = 0; i < block->threads_count; i++)
        begin_thread(block, &block->threads[i], i);
    registers_reset(block);
    barriers_reset(block);
    mbarriers_reset(block);
    warpgroups_reset(block->warpgroups, block->warpgroups_count);
}

void cluster_begin(Cluster *cluster, const u32 *id)
{
    const Launch *launch = cluster->launch;
    const u32 *shape = launch->cluster;
    cluster->arrived = cluster->exited = cluster->exited_after_arrival = 0;
    cluster->fences = cluster->era = 0;
    cluster->acquired = false;
    for (u32 i = 0; i < cluster->blocks_count; i++) {
        Block *block = &cluster->blocks[i];
        block->id[0] = id[0] * shape[0] + i % shape[0];
        block->id[1] = id[1] * shape[1] + i / shape[0] % shape[1];
        block->id[2] = id[2] * shape[2] + i / shape[0] / shape[1];
        begin_block(block);
    }
    if (cluster->races)
        races_begin_cluster(cluster);
}

static void new_block(Cluster *cluster, u32 rank)
{
    const Launch *launch = cluster->launch;
    Block *block = &cluster->blocks[rank];
    block->cluster = cluster;
    block->rank = rank;
    block->threads_count = launch->block[0] * launch->block[1] * launch->block[2];
    block->threads = cluster->threads + rank * block->threads_count;
    block->shared_bytes = launch->static_shared + launch->dynamic_shared;
    block->first_shared = (u64)rank << RANK_SHIFT | SHARED_BASE;
    block->shared = aligned_alloc(1024, (block->shared_bytes + 2047) / 1024 * 1024);
    if (launch->uses_async_proxy)
        block->writers = calloc(block->shared_bytes, sizeof(u32));
    u32 warps = (block->threads_count + WARP - 1) / WARP;
    block->warps = calloc(warps, sizeof(Warp));
    for (u32 i = 0; i < warps; i++)
        block->warps[i].meetings = meetings_new();
}

void cluster_build(Cluster *cluster)
{
    const Launch *launch = cluster->launch;
    u32 threads = launch->block[0] * launch->block[1] * launch->block[2];
    cluster->blocks_count = launch->cluster[0] * launch->cluster[1] * launch->cluster[2];
    cluster->threads_count = threads * cluster->blocks_count;
    cluster->blocks = calloc(cluster->blocks_count, sizeof(Block));
    cluster->threads = calloc(cluster->threads_count, sizeof(Thread));
    for (u32 i = 0; i < cluster->blocks_count; i++)
        new_block(cluster, i);
    if (launch->races)
        cluster->races = races_new(cluster);
    for (u32 i = 0; i < 2; i++)
        cluster->barrier_clocks[i] = clock_new(cluster->races);
    for (u32 i = 0; i < cluster->blocks_count; i++) {
        Block *block = &cluster->blocks[i];
        block->barriers = barriers_new(cluster->races);
        block->warpgroups_count = (threads + WARPGROUP - 1) / WARPGROUP;
        block->warpgroups = warpgroups_new(cluster->races, block->warpgroups_count);
    }
}

void cluster_destroy(Cluster *cluster)
{
    bulk_copies_free(cluster);
    for (u32 i = 0; i < cluster->threads_count; i++)
        cp_async_free(&cluster->threads[i]);
    races_free(cluster);
    for (u32 i = 0; i < cluster->blocks_count; i++) {
        Block *block = &cluster->blocks[i];
        for (u32 k = 0; k < (block->threads_count + WARP - 1) / WARP; k++)
            free(block->warps[k].meetings);
        barriers_free(block);
        mbarriers_free(block);
        warpgroups_free(block->warpgroups, block->warpgroups_count);
        free(block->shared);
        free(block->writers);
        free(block->warps);
    }
    free(cluster->barrier_clocks[0]);
    free(cluster->barrier_clocks[1]);
    free(cluster->blocks);
    free(cluster->threads);
}
