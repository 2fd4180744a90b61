/* Runs a grid, one cluster of blocks after another, in the order of the schedule. */
#include "races.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define SPIN_ROUNDS 10000 /* without progress, until threads that poll count as stuck */

static jmp_buf outside; /* where a failure goes that happens in no thread */
static bool in_thread;

u64 random_number(Cluster *cluster)
{
    u64 x = cluster->random;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return cluster->random = x;
}

void rt_fail(Thread *t, const char *format, ...)
{
    Cluster *cluster = t->block->cluster;
    char *error = ((Launch *)cluster->launch)->error;
    size_t size = sizeof cluster->launch->error;
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(error, size, format, arguments);
    va_end(arguments);
    const u32 *block = t->block->id, *tid = t->tid;
    snprintf(error + length, size - (size_t)length, " [block (%u, %u, %u), thread (%u, %u, %u), PTX line %u]", block[0],
             block[1], block[2], tid[0], tid[1], tid[2], t->line);
    cluster->failed = true;
    if (!in_thread)
        longjmp(outside, 1);
    for (;;)
        fiber_suspend(t);
}

void thread_main(Thread *t)
{
    Cluster *cluster = t->block->cluster;
    cluster->kernel(t, cluster->parameters);
    rt_exit(t);
}

void rt_exit(Thread *t)
{
    bulk_copies_thread_exits(t);
    wgmma_thread_exits(t);
    t->state = DONE;
    for (;;)
        fiber_suspend(t);
}

void wait_for_change(Thread *t, const u32 *counter, u32 seen, const char *what)
{
    t->counter = counter;
    t->seen = seen;
    t->waits_for = what;
    t->state = WAITING;
    fiber_suspend(t);
    t->state = READY;
}

/* Lets others run; the thread goes on whatever they do. */
void rt_spin(Thread *t, const char *what)
{
    t->waits_for = what;
    t->state = SPINNING;
    fiber_suspend(t);
    t->state = READY;
}

static void exited(Thread *t)
{
    fiber_release(t);
    t->warp->live &= ~(1u << t->lane);
    t->block->live--;
    t->block->cluster->progress++;
    if (!t->block->live)
        registers_block_exits(t);
    race_thread_exited(t);
    barriers_thread_exited(t);
    cluster_thread_exited(t);
}

static bool runnable(const Thread *t)
{
    return t->state == READY || t->state == SPINNING || (t->state == WAITING && *t->counter != t->seen);
}

static void shuffle(Cluster *cluster, u32 *order, u32 count)
{
    for (u32 i = count - 1; i > 0; i--) {
        u32 other = random_number(cluster) % (i + 1);
        u32 swapped = order[i];
        order[i] = order[other];
        order[other] = swapped;
    }
}

static bool in_same_state(const Thread *a, const Thread *b)
{
    if (a->block != b->block || a->state != b->state)
        return false;
    return a->state == DONE || (a->line == b->line && a->waits_for == b->waits_for);
}

static u32 blocks_of_grid(const Launch *launch)
{
    return launch->grid[0] * launch->grid[1] * launch->grid[2];
}

/* "threads 0-31 wait for barrier 0 at PTX line 12; threads 32-63 have exited" */
static void report_deadlock(Cluster *cluster)
{
    char *end = ((Launch *)cluster->launch)->error;
    const char *limit = end + sizeof cluster->launch->error - 200;
    const u32 *id = cluster->blocks[0].id;
    bool polls = false;
    end += sprintf(end, "deadlock [block (%u, %u, %u)]:", id[0], id[1], id[2]);
    for (u32 i = 0, next; i < cluster->threads_count && end < limit; i = next) {
        const Thread *t = &cluster->threads[i];
        for (next = i + 1; next < cluster->threads_count; next++)
            if (!in_same_state(t, &cluster->threads[next]))
                break;
        end += sprintf(end, "%s threads %u-%u", i ? ";" : "", t->number, t->number + next - i - 1);
        if (cluster->blocks_count > 1)
            end += sprintf(end, " of block %u", t->block->rank);
        if (t->state == DONE)
            end += sprintf(end, " have exited");
        else
            end += sprintf(end, " wait for %s at PTX line %u", t->waits_for, t->line);
        polls |= t->state == SPINNING;
    }
    if (polls && cluster->blocks_count < blocks_of_grid(cluster->launch))
        sprintf(end, "; blocks run one after another: this one may wait for another that has not begun");
    cluster->failed = true;
}

static void run_thread(Cluster *cluster, Thread *t)
{
    if (!t->stack)
        fiber_start(t);
    in_thread = true;
    fiber_resume(t);
    in_thread = false;
    if (cluster->failed || t->state != DONE)
        return;
    exited(t);
}

static u32 run_round(Cluster *cluster, const u32 *order)
{
    u32 ran = 0;
    for (u32 i = 0; i < cluster->threads_count && !cluster->failed; i++) {
        Thread *t = &cluster->threads[order[i]];
        if (!runnable(t))
            continue;
        ran++;
        run_thread(cluster, t);
        if (cluster->launch->copies == 2 && cluster->first_copy && !cluster->failed)
            bulk_copies_at_random(cluster);
    }
    return ran;
}

static bool all_done(const Cluster *cluster)
{
    for (u32 i = 0; i < cluster->blocks_count; i++)
        if (cluster->blocks[i].live)
            return false;
    return true;
}

static void run_cluster(Cluster *cluster, u32 *order)
{
    u32 idle = 0;
    while (!all_done(cluster)) {
        u64 before = cluster->progress;
        if (cluster->launch->schedule == 2)
            shuffle(cluster, order, cluster->threads_count);
        u32 ran = run_round(cluster, order);
        if (cluster->failed)
            return;
        if (cluster->progress != before) {
            idle = 0;
            continue;
        }
        if (bulk_copies_land(cluster))
            continue;
        if (!ran || ++idle > SPIN_ROUNDS) {
            report_deadlock(cluster);
            return;
        }
    }
    bulk_copies_end(cluster);
}

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
    /* A value that is neither small, nor a likely float, nor a NaN in any format that we read. */
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

static void begin_cluster(Cluster *cluster, const u32 *id)
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

static void build(Cluster *cluster)
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

static void destroy(Cluster *cluster)
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

static u32 *new_order(const Launch *launch, u32 count)
{
    u32 *order = malloc(count * sizeof *order);
    for (u32 i = 0; i < count; i++)
        order[i] = launch->schedule == 1 ? count - 1 - i : i;
    return order;
}

static void run_grid(Cluster *cluster, u32 *order, u32 *clusters_order, u32 count)
{
    const Launch *launch = cluster->launch;
    u32 columns = launch->grid[0] / launch->cluster[0], rows = launch->grid[1] / launch->cluster[1];
    if (launch->schedule == 2)
        shuffle(cluster, clusters_order, count);
    for (u32 i = 0; i < count && !cluster->failed; i++) {
        cluster->number = clusters_order[i];
        u32 id[3] = {cluster->number % columns, cluster->number / columns % rows, cluster->number / columns / rows};
        begin_cluster(cluster, id);
        run_cluster(cluster, order);
    }
    if (!cluster->failed)
        bulk_copies_end_of_grid(cluster);
}

/* Returns whether the launch failed: then launch->error says why. */
int rt_launch(Launch *launch, Kernel kernel, const u8 *parameters)
{
    static Cluster cluster;
    cluster = (Cluster){.launch = launch, .kernel = kernel, .parameters = parameters};
    cluster.random = launch->seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull;
    build(&cluster);
    u32 count = blocks_of_grid(launch) / cluster.blocks_count;
    u32 *order = new_order(launch, cluster.threads_count), *clusters_order = new_order(launch, count);
    cluster.global_races = global_races_new(launch, count);
    if (!fibers_reserve(cluster.threads_count, launch->stack_bytes)) {
        snprintf(launch->error, sizeof launch->error, "no memory for the stacks of %u threads", cluster.threads_count);
        cluster.failed = true;
    } else if (!setjmp(outside)) {
        run_grid(&cluster, order, clusters_order, count);
    }
    int failed = cluster.failed;
    free(order);
    free(clusters_order);
    global_races_free(cluster.global_races);
    destroy(&cluster);
    return failed;
}
