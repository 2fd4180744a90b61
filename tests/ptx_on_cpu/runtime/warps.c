/* Collective instructions of a warp: .sync instructions with a mask of lanes. */
#include "races.h"
#include <stdlib.h>

/* A meeting: lanes of one mask that wait for each other. A warp has at most 32 disjoint masks. */
struct Meeting {
    u32 mask, arrived, line, generation;
    void *arguments[WARP];
};

struct Meeting *meetings_new(void)
{
    return calloc(WARP, sizeof(struct Meeting));
}

static struct Meeting *find_meeting(Thread *t, u32 mask)
{
    Warp *warp = t->warp;
    for (u32 open = warp->open; open; open &= open - 1) {
        struct Meeting *meeting = &warp->meetings[__builtin_ctz(open)];
        if (meeting->mask == mask)
            return meeting;
        if (meeting->mask & mask)
            rt_fail(t, "divergence: lanes of masks 0x%08x and 0x%08x wait for each other", meeting->mask, mask);
    }
    u32 index = __builtin_ctz(~warp->open);
    warp->open |= 1u << index;
    struct Meeting *meeting = &warp->meetings[index];
    meeting->mask = mask;
    meeting->arrived = 0;
    meeting->line = t->line;
    return meeting;
}

/* Waits for the lanes of `mask`; the last one calls `together` with the arguments of all. */
void meet(Thread *t, u32 mask, void *argument, Together together)
{
    Warp *warp = t->warp;
    if (!(mask >> t->lane & 1))
        rt_fail(t, "lane %u executes a .sync instruction whose mask 0x%08x leaves it out", t->lane, mask);
    if (mask & ~warp->live)
        rt_fail(t, "the mask 0x%08x of a .sync instruction names lanes 0x%08x that exited or never were",
                mask, mask & ~warp->live);
    struct Meeting *meeting = find_meeting(t, mask);
    if (meeting->line != t->line)
        rt_fail(t, "divergence: lanes of one warp are at the .sync instructions of PTX line %u and PTX line %u",
                meeting->line, t->line);
    meeting->arguments[t->lane] = argument;
    meeting->arrived |= 1u << t->lane;
    t->block->cluster->progress++;
    if (meeting->arrived != mask) {
        wait_for_change(t, &meeting->generation, meeting->generation, "lanes of its warp");
        return;
    }
    if (together)
        together(warp, mask, meeting->arguments);
    warp->open &= ~(1u << (meeting - warp->meetings));
    meeting->generation++;
}

#define FOR_LANES(lane, mask) for (u32 lane = 0; lane < WARP; lane++) if (mask >> lane & 1)

static Thread *lane_thread(Warp *warp, u32 lane)
{
    return &warp->block->threads[warp->id * WARP + lane];
}

/* Orders earlier accesses of all lanes before later ones. */
static void join_lanes(Warp *warp, u32 mask, void **arguments)
{
    (void)arguments;
    const Races *races = warp->block->cluster->races;
    if (!races)
        return;
    u32 *joined = clock_new(races);
    FOR_LANES(lane, mask)
        race_release(lane_thread(warp, lane), joined);
    FOR_LANES(lane, mask)
        race_acquire(lane_thread(warp, lane), joined);
    free(joined);
}

void rt_warp_sync(Thread *t, u32 mask)
{
    trace(t, TRACE_WARP, mask, 0, 0, 0);
    meet(t, mask, NULL, join_lanes);
}

static void shuffle_lanes(Warp *warp, u32 mask, void **arguments)
{
    (void)warp;
    FOR_LANES(lane, mask) {
        Shuffle *own = arguments[lane];
        u32 segment = own->clamp >> 8 & 31;
        u32 clamp = own->clamp & 31;
        s32 last = (s32)((lane & segment) | (clamp & ~segment));
        s32 first = (s32)(lane & segment);
        s32 offset = (s32)(own->source & 31);
        s32 source;
        switch (own->mode) {
        case SHUFFLE_UP:
            source = (s32)lane - offset;
            own->in_range = source >= last;
            break;
        case SHUFFLE_DOWN:
            source = (s32)lane + offset;
            own->in_range = source <= last;
            break;
        case SHUFFLE_BUTTERFLY:
            source = (s32)lane ^ offset;
            own->in_range = source <= last;
            break;
        default:
            source = first | (offset & (s32)~segment);
            own->in_range = source <= last;
        }
        if (!own->in_range)
            source = (s32)lane;
        /* The value of a lane that does not participate is undefined. */
        own->result = mask >> source & 1 ? ((Shuffle *)arguments[source])->value : 0xdeadbeef;
    }
}

void rt_shuffle(Thread *t, u32 mask, Shuffle *shuffle)
{
    meet(t, mask, shuffle, shuffle_lanes);
}

typedef struct {
    u64 value;
    int operation;
    u32 result;
} Contribution;

static void vote_lanes(Warp *warp, u32 mask, void **arguments)
{
    (void)warp;
    u32 ballot = 0;
    FOR_LANES(lane, mask)
        ballot |= (u32)(((Contribution *)arguments[lane])->value != 0) << lane;
    FOR_LANES(lane, mask) {
        Contribution *own = arguments[lane];
        switch (own->operation) {
        case VOTE_ALL:
            own->result = ballot == mask;
            break;
        case VOTE_ANY:
            own->result = ballot != 0;
            break;
        case VOTE_UNIFORM:
            own->result = ballot == mask || ballot == 0;
            break;
        default:
            own->result = ballot;
        }
    }
}

u32 rt_vote(Thread *t, u32 mask, u32 predicate, int operation)
{
    Contribution own = {predicate, operation, 0};
    meet(t, mask, &own, vote_lanes);
    return own.result;
}

static void match_lanes(Warp *warp, u32 mask, void **arguments)
{
    (void)warp;
    FOR_LANES(lane, mask) {
        Contribution *own = arguments[lane];
        FOR_LANES(other, mask)
            own->result |= (u32)(((Contribution *)arguments[other])->value == own->value) << other;
    }
}

u32 rt_match_any(Thread *t, u32 mask, u64 value)
{
    Contribution own = {value, 0, 0};
    meet(t, mask, &own, match_lanes);
    return own.result;
}

static u32 reduce(int operation, u32 a, u32 b)
{
    switch (operation) {
    case REDUCE_ADD:
        return a + b;
    case REDUCE_MIN_S:
        return (s32)a < (s32)b ? a : b;
    case REDUCE_MAX_S:
        return (s32)a > (s32)b ? a : b;
    case REDUCE_MIN_U:
        return a < b ? a : b;
    case REDUCE_MAX_U:
        return a > b ? a : b;
    case REDUCE_AND:
        return a & b;
    case REDUCE_OR:
        return a | b;
    default:
        return a ^ b;
    }
}

static void reduce_lanes(Warp *warp, u32 mask, void **arguments)
{
    (void)warp;
    Contribution *first = arguments[__builtin_ctz(mask)];
    u32 result = (u32)first->value;
    FOR_LANES(lane, (mask & (mask - 1)))
        result = reduce(first->operation, result, (u32)((Contribution *)arguments[lane])->value);
    FOR_LANES(lane, mask)
        ((Contribution *)arguments[lane])->result = result;
}

u32 rt_redux(Thread *t, u32 mask, u32 value, int operation)
{
    Contribution own = {value, operation, 0};
    meet(t, mask, &own, reduce_lanes);
    return own.result;
}

u32 rt_elect(Thread *t, u32 mask, u32 *leader)
{
    meet(t, mask, NULL, NULL);
    *leader = __builtin_ctz(mask);
    return t->lane == *leader;
}
