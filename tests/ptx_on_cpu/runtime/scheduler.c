/* Runs a grid, one cluster of blocks after another, in the order of the schedule. */
#include "races.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define SPIN_ROUNDS 10000 /* without progress, until polling threads are reported as a deadlock */

static jmp_buf outside; /* the target of failures outside threads */
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

/* Lets other threads run; does not wait for a condition. */
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
        cluster_begin(cluster, id);
        run_cluster(cluster, order);
    }
    if (!cluster->failed)
        bulk_copies_end_of_grid(cluster);
}

/* Returns whether the launch failed; launch->error is the message. */
int rt_launch(Launch *launch, Kernel kernel, const u8 *parameters)
{
    static Cluster cluster;
    cluster = (Cluster){.launch = launch, .kernel = kernel, .parameters = parameters};
    cluster.random = launch->seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull;
    cluster_build(&cluster);
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
    cluster_destroy(&cluster);
    return failed;
}
