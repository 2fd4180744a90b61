/* Bulk copies in flight (cp.async.bulk and st.async), and the order in which they arrive. */
#include "bulk_copies.h"
#include <stdlib.h>

void bulk_unlink(Cluster *cluster, Copy *copy)
{
    *(copy->previous ? &copy->previous->next : &cluster->first_copy) = copy->next;
    *(copy->next ? &copy->next->previous : &cluster->last_copy) = copy->previous;
}

void bulk_remove(Copy *copy)
{
    bulk_unlink(copy->thread->block->cluster, copy);
    free(copy->staged);
    free(copy);
}

Copy *bulk_add(const Copy *description)
{
    Cluster *cluster = description->thread->block->cluster;
    Copy *copy = malloc(sizeof *copy);
    *copy = *description;
    copy->owner = cluster->number;
    copy->previous = cluster->last_copy;
    copy->next = NULL;
    *(cluster->last_copy ? &cluster->last_copy->next : &cluster->first_copy) = copy;
    cluster->last_copy = copy;
    cluster->progress++;
    return copy;
}

/* All threads are blocked: the oldest load arrives. */
bool bulk_copies_land(Cluster *cluster)
{
    for (Copy *copy = cluster->first_copy; copy; copy = copy->next) {
        if (!is_store(copy)) {
            bulk_load_lands(copy);
            return true;
        }
    }
    return false;
}

void bulk_copies_at_random(Cluster *cluster)
{
    u32 count = 0;
    for (const Copy *copy = cluster->first_copy; copy; copy = copy->next)
        count++;
    if (!count || random_number(cluster) & 7)
        return;
    Copy *copy = cluster->first_copy;
    for (u64 skip = random_number(cluster) % count; skip; skip--)
        copy = copy->next;
    if (!is_store(copy))
        bulk_load_lands(copy);
    else if (!copy->staged)
        bulk_stage(copy);
    else
        bulk_store_lands(copy);
}

void bulk_copies_thread_exits(Thread *t)
{
    for (const Copy *copy = t->block->cluster->first_copy; copy; copy = copy->next)
        if (copy->thread == t && is_store(copy) && !copy->waited)
            rt_fail(t, "the thread exits without cp.async.bulk.wait_group for a store from shared memory");
}

/* Other blocks run before the store arrives. */
static void hold(Cluster *cluster, Copy *copy)
{
    bulk_stage(copy);
    bulk_unlink(cluster, copy);
    copy->next = cluster->held;
    cluster->held = copy;
}

void bulk_copies_end(Cluster *cluster)
{
    while (cluster->first_copy) {
        Copy *copy = cluster->first_copy;
        if (!is_store(copy))
            rt_fail(copy->thread, "the block ends while a bulk load is in flight");
        u32 copies = cluster->launch->copies;
        if (copy->bytes && (copies == 1 || (copies == 2 && random_number(cluster) & 1))) {
            hold(cluster, copy);
            continue;
        }
        bulk_store_lands(copy);
        bulk_remove(copy);
    }
}

/* Stores that no thread waited for arrive at the end of the grid at the latest. */
void bulk_copies_end_of_grid(Cluster *cluster)
{
    for (Copy *copy = cluster->held; copy; copy = copy->next)
        bulk_store_lands(copy);
}

void bulk_copies_free(Cluster *cluster)
{
    while (cluster->first_copy)
        bulk_remove(cluster->first_copy);
    while (cluster->held) {
        Copy *next = cluster->held->next;
        free(cluster->held->staged);
        free(cluster->held);
        cluster->held = next;
    }
}
