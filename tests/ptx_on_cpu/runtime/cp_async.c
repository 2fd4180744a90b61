/* cp.async: a thread copies 4, 8 or 16 bytes from global to shared memory, in groups for which it waits. */
#include "races.h"
#include <stdlib.h>

typedef struct {
    u8 *target;
    const u8 *source;
    u32 bytes, source_bytes, group;
} SmallCopy;

struct CopyQueue {
    u32 count, capacity, committed, completed;
    SmallCopy *copies;
};

void cp_async_reset(Thread *t)
{
    if (t->copies)
        t->copies->count = t->copies->committed = t->copies->completed = 0;
}

void cp_async_free(Thread *t)
{
    if (t->copies)
        free(t->copies->copies);
    free(t->copies);
}

static void land(const SmallCopy *copy)
{
    memcpy(copy->target, copy->source, copy->source_bytes);
    memset(copy->target + copy->source_bytes, 0, copy->bytes - copy->source_bytes);
}

static struct CopyQueue *queue_of(Thread *t)
{
    if (!t->copies)
        t->copies = calloc(1, sizeof *t->copies);
    return t->copies;
}

void rt_cp_async(Thread *t, u64 target, u64 source, u32 bytes, u32 source_bytes, u32 *hit)
{
    struct CopyQueue *queue = queue_of(t);
    Block *block = t->block;
    u32 offset = own_window(t, target, bytes, bytes);
    if (source_bytes > bytes)
        rt_fail(t, "cp.async reads %u bytes but copies %u", source_bytes, bytes);
    if (source & (bytes - 1))
        rt_fail(t, "misaligned cp.async of %u bytes from address 0x%llx", bytes, (unsigned long long)source);
    if (source_bytes)
        check_global(t, source, source_bytes, READ, hit);
    rt_global_access(t, (const void *)source, source_bytes, PLAIN_READ);
    race_cp_async(t, offset, bytes, queue->committed);
    written_through_generic_proxy(t, block, offset, bytes);
    SmallCopy copy = {block->shared + offset, (const u8 *)source, bytes, source_bytes, queue->committed};
    u32 copies = t->launch->copies;
    if (copies == 0 || (copies == 2 && random_number(block->cluster) & 1)) {
        land(&copy);
        return;
    }
    if (queue->count == queue->capacity) {
        queue->capacity = queue->capacity ? 2 * queue->capacity : 16;
        queue->copies = realloc(queue->copies, queue->capacity * sizeof *queue->copies);
    }
    queue->copies[queue->count++] = copy;
}

void rt_cp_async_commit(Thread *t)
{
    queue_of(t)->committed++;
}

void rt_cp_async_wait(Thread *t, u32 pending)
{
    struct CopyQueue *queue = queue_of(t);
    if (queue->committed < pending + queue->completed)
        return;
    queue->completed = queue->committed - pending;
    u32 kept = 0;
    for (u32 i = 0; i < queue->count; i++) {
        if (queue->copies[i].group < queue->completed)
            land(&queue->copies[i]);
        else
            queue->copies[kept++] = queue->copies[i];
    }
    queue->count = kept;
    race_cp_async_done(t, queue->completed);
}
