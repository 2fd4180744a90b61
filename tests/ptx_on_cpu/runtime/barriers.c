/* bar, barrier.cluster and the fences between proxies. */
#include "races.h"
#include <stdio.h>
#include <stdlib.h>

struct Barrier {
    u32 arrived, generation;
    u32 count; /* of threads to wait for; 0: all that have not exited */
    u32 predicates;   /* number of true ones, for bar.red */
    u32 total, trues; /* of the previous generation */
    bool in_use;
    u32 *clock;
    char name[24];
};

struct Barrier *barriers_new(const Races *races)
{
    struct Barrier *barriers = calloc(NAMED_BARRIERS, sizeof *barriers);
    for (u32 i = 0; i < NAMED_BARRIERS; i++) {
        barriers[i].clock = clock_new(races);
        snprintf(barriers[i].name, sizeof barriers[i].name, "barrier %u", i);
    }
    return barriers;
}

void barriers_reset(Block *block)
{
    for (u32 i = 0; i < NAMED_BARRIERS; i++) {
        struct Barrier *barrier = &block->barriers[i];
        barrier->arrived = barrier->predicates = 0;
        barrier->in_use = false;
        clock_clear(block->cluster->races, barrier->clock);
    }
}

void barriers_free(Block *block)
{
    if (!block->barriers)
        return;
    for (u32 i = 0; i < NAMED_BARRIERS; i++)
        free(block->barriers[i].clock);
    free(block->barriers);
}

static bool all_met(Warp *warp)
{
    if (!warp->met || (warp->met & warp->live) != warp->live)
        return false;
    warp->met = 0;
    warp->meetings_done++;
    return true;
}

/* All lanes of a warp have to reach the same aligned instruction. */
static bool check_aligned(Thread *t)
{
    Warp *warp = t->warp;
    u32 lane = 1u << t->lane;
    if (warp->met && warp->meeting_line != t->line)
        rt_fail(t, "divergence: lanes of one warp are at the aligned instructions of PTX line %u and PTX line %u",
                warp->meeting_line, t->line);
    if (warp->met & lane)
        rt_fail(t, "divergence: a lane repeats an aligned instruction that lanes 0x%08x have not reached",
                warp->live & ~warp->met);
    warp->meeting_line = t->line;
    warp->met |= lane;
    return all_met(warp);
}

/* For aligned instructions without another wait. */
void rt_converge(Thread *t)
{
    Warp *warp = t->warp;
    u32 done = warp->meetings_done;
    if (!check_aligned(t))
        wait_for_change(t, &warp->meetings_done, done, "lanes of its warp");
}

static void complete(Block *block, struct Barrier *barrier, Thread *last)
{
    barrier->total = barrier->arrived;
    barrier->trues = barrier->predicates;
    barrier->arrived = barrier->predicates = 0;
    barrier->in_use = false;
    if (block->cluster->races) {
        for (u32 i = 0; i < block->threads_count; i++) {
            Thread *t = &block->threads[i];
            if (t->state == WAITING && t->counter == &barrier->generation)
                race_acquire(t, barrier->clock);
        }
        if (last)
            race_acquire(last, barrier->clock);
        clock_clear(block->cluster->races, barrier->clock);
    }
    barrier->generation++;
    block->cluster->progress++;
}

static bool is_complete(const Block *block, const struct Barrier *barrier)
{
    return barrier->in_use && barrier->arrived >= (barrier->count ? barrier->count : block->live);
}

static struct Barrier *arrive(Thread *t, u32 id, u32 count, bool aligned, bool waits, bool predicate)
{
    Block *block = t->block;
    trace(t, waits ? TRACE_BARRIER : TRACE_BARRIER_ARRIVE, id, count, 0, 0);
    if (aligned && waits)
        check_aligned(t);
    else if (aligned)
        rt_converge(t);
    if (id >= NAMED_BARRIERS)
        rt_fail(t, "barrier %u: there are %u", id, NAMED_BARRIERS);
    if (count % WARP)
        rt_fail(t, "barrier %u: a count of %u threads is no multiple of %u", id, count, WARP);
    struct Barrier *barrier = &block->barriers[id];
    if (barrier->in_use && barrier->count != count)
        rt_fail(t, "barrier %u is used with counts of %u and of %u threads at the same time",
                id, barrier->count, count);
    barrier->in_use = true;
    barrier->count = count;
    barrier->arrived++;
    barrier->predicates += predicate;
    block->cluster->progress++;
    race_release(t, barrier->clock);
    if (is_complete(block, barrier))
        complete(block, barrier, waits ? t : NULL);
    else if (waits)
        wait_for_change(t, &barrier->generation, barrier->generation, barrier->name);
    return barrier;
}

void rt_bar_sync(Thread *t, u32 id, u32 count, bool aligned)
{
    arrive(t, id, count, aligned, true, false);
}

void rt_bar_arrive(Thread *t, u32 id, u32 count, bool aligned)
{
    if (!count)
        rt_fail(t, "bar.arrive on barrier %u without a count of threads", id);
    arrive(t, id, count, aligned, false, false);
}

u32 rt_bar_reduce(Thread *t, u32 id, u32 count, bool aligned, u32 predicate, int operation)
{
    const struct Barrier *barrier = arrive(t, id, count, aligned, true, predicate);
    if (operation == REDUCE_AND)
        return barrier->trues == barrier->total;
    return operation == REDUCE_OR ? barrier->trues > 0 : barrier->trues;
}

/* A barrier without a count waits for the threads that have not exited. */
void barriers_thread_exited(Thread *t)
{
    Block *block = t->block;
    all_met(t->warp);
    for (u32 i = 0; i < NAMED_BARRIERS && block->live; i++)
        if (is_complete(block, &block->barriers[i]))
            complete(block, &block->barriers[i], NULL);
}

/* A thread that has exited counts as arrived. */
static void complete_cluster(Cluster *cluster)
{
    if (cluster->arrived + cluster->exited < cluster->threads_count)
        return;
    cluster->arrived = 0;
    cluster->exited += cluster->exited_after_arrival;
    cluster->exited_after_arrival = 0;
    cluster->generation++;
    cluster->progress++;
}

void cluster_thread_exited(Thread *t)
{
    Cluster *cluster = t->block->cluster;
    if (t->cluster_arrival == cluster->generation + 1)
        cluster->exited_after_arrival++;
    else
        cluster->exited++;
    complete_cluster(cluster);
}

void rt_cluster_arrive(Thread *t, bool aligned, bool release)
{
    Cluster *cluster = t->block->cluster;
    trace(t, TRACE_CLUSTER_ARRIVE, 0, 0, 0, 0);
    if (aligned)
        rt_converge(t);
    if (t->cluster_arrival)
        rt_fail(t, "barrier.cluster.arrive twice without barrier.cluster.wait");
    t->cluster_arrival = cluster->generation + 1;
    cluster->arrived++;
    cluster->progress++;
    u32 *clock = cluster->barrier_clocks[cluster->generation & 1];
    if (release)
        race_release(t, clock);
    else
        race_release_initialized(t, clock);
    complete_cluster(cluster);
}

void rt_cluster_wait(Thread *t, bool aligned, bool acquire)
{
    Cluster *cluster = t->block->cluster;
    trace(t, TRACE_CLUSTER_WAIT, 0, 0, 0, 0);
    if (aligned)
        rt_converge(t);
    if (!t->cluster_arrival)
        rt_fail(t, "barrier.cluster.wait without barrier.cluster.arrive");
    u32 generation = t->cluster_arrival - 1;
    if (cluster->generation == generation)
        wait_for_change(t, &cluster->generation, generation, "barrier.cluster.wait");
    t->cluster_arrival = 0;
    if (acquire)
        race_acquire(t, cluster->barrier_clocks[generation & 1]);
}

void rt_proxy_fence(Thread *t)
{
    t->last_fence = ++t->block->cluster->fences;
    t->last_barrier_fence = t->last_fence;
}

void rt_barrier_init_fence(Thread *t)
{
    t->last_barrier_fence = ++t->block->cluster->fences;
    mbarriers_publish(t);
}
