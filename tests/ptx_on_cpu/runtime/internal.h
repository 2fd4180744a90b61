/* Declarations that the files of the runtime share. */
#pragma once
#include "runtime.h"

#define NAMED_BARRIERS 16
#define WARP 32u
#define WARPGROUP 128u

typedef struct Copy Copy;
typedef struct Races Races;

/* The blocks that run at the same time. */
struct Cluster {
    const Launch *launch;
    Block *blocks;
    u32 blocks_count;
    Thread *threads; /* of all its blocks */
    u32 threads_count;
    Thread *current;
    u64 progress;           /* number of events that may unblock a thread */
    u64 random;             /* state of the generator */
    u32 fences;             /* fence.proxy.async and fence.mbarrier_init executed so far */
    u32 arrived, generation;           /* of its barrier */
    u32 exited, exited_after_arrival;  /* threads that no longer arrive there */
    u32 *barrier_clocks[2];            /* of even and of odd generations */
    Races *races;
    Copy *first_copy, *last_copy; /* asynchronous bulk copies in flight, oldest first */
    Copy *held;                   /* stores of clusters that have ended */
    u32 number;                   /* in the grid */
    struct GlobalRaces *global_races;
    bool acquired;                /* at the GPU's scope, since its start */
    u32 era;                      /* number of releases at the GPU's scope */
    bool failed;
    Kernel kernel;
    const u8 *parameters;
};

/* fibers.c */
bool fibers_reserve(u32 count, u32 stack_bytes);
void fiber_start(Thread *t);
void fiber_release(Thread *t);
void fiber_resume(Thread *t);
void fiber_suspend(Thread *t);
void thread_main(Thread *t); /* the entry of a fiber; does not return */

/* trace.c */
void trace(const Thread *t, TraceKind kind, u32 a, u32 b, u32 c, u32 d);

/* scheduler.c */
void wait_for_change(Thread *t, const u32 *counter, u32 seen, const char *what);
u64 random_number(Cluster *cluster);

/* cluster.c */
void cluster_build(Cluster *cluster);
void cluster_begin(Cluster *cluster, const u32 *id);
void cluster_destroy(Cluster *cluster);

/* memory.c */
Block *block_of_rank(Thread *t, u64 rank);
Block *shared_window(Thread *t, u64 address, u32 bytes, u32 alignment, u32 *offset);
u32 own_window(Thread *t, u64 address, u32 bytes, u32 alignment);
Block *block_of_pointer(Cluster *cluster, const u8 *pointer);
bool is_parameter(const Thread *t, u64 address, u32 bytes);
void check_global(Thread *t, u64 address, u32 bytes, Access access, u32 *hit);
void written_through_generic_proxy(Thread *t, Block *block, u32 offset, u32 bytes);
void written_through_async_proxy(Block *block, u32 offset, u32 bytes);
void check_proxy_fence(Thread *t, Block *block, u32 offset, u32 bytes, const char *reader);

/* barriers.c */
struct Barrier *barriers_new(const Races *races);
void barriers_reset(Block *block);
void barriers_free(Block *block);
void barriers_thread_exited(Thread *t);
void cluster_thread_exited(Thread *t);

/* global_races.c */
struct GlobalRaces *global_races_new(const Launch *launch, u32 clusters);
void global_races_free(struct GlobalRaces *races);
void global_access(Thread *t, u32 owner, u64 address, u32 bytes, GlobalAccess access);

/* registers.c */
void registers_reset(Block *block);
void registers_block_exits(Thread *last);

/* warps.c */
typedef void (*Together)(Warp *warp, u32 mask, void **arguments);
struct Meeting *meetings_new(void);
void meet(Thread *t, u32 mask, void *argument, Together together);

/* mbarriers.c */
void mbarriers_free(Block *block);
void mbarriers_reset(Block *block);
void mbarriers_publish(Thread *t);

/* wgmma.c */
struct Warpgroup *warpgroups_new(const Races *races, u32 count);
void warpgroups_reset(struct Warpgroup *groups, u32 count);
void warpgroups_free(struct Warpgroup *groups, u32 count);
void wgmma_thread_exits(Thread *t);

/* accumulators.c */
void accumulators_take(Thread *t, const Wgmma *wgmma, u32 shape, u32 *values);
void accumulators_give(Thread *t, const Wgmma *wgmma, u32 shape, u32 group, const u32 *values);
void accumulators_settle(Thread *t, Accumulators *accumulators, u32 done);

/* cp_async.c and bulk_copies.c */
void cp_async_reset(Thread *t);
void cp_async_free(Thread *t);
bool bulk_copies_land(Cluster *cluster);
void bulk_copies_at_random(Cluster *cluster);
void bulk_copies_thread_exits(Thread *t);
void bulk_copies_end(Cluster *cluster);
void bulk_copies_end_of_grid(Cluster *cluster);
void bulk_copies_free(Cluster *cluster);

/* matrices.c */
float element_value(Element type, u32 bits);
float multiply_accumulate(const Launch *launch, Element type, float c, const float *a, const float *b, int k);
void unpack_a(const u32 *registers, int lane, Element type, float *rows, int k);
