/* The interface of the runtime for translated kernels. Every CUDA thread is a fiber: a C function with its own stack. */
#pragma once
#include "numbers.h"

#define SHARED_BASE 1024u /* the first shared address of a kernel: the driver keeps the KiB below */
#define PARAMETERS_BASE 0x400u /* the address of the first parameter in the parameter space */
#define RANK_SHIFT 24     /* from this bit on shared addresses hold their block's rank, also in the block itself */

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

typedef struct Thread Thread;
typedef struct Warp Warp;
typedef struct Block Block;
typedef struct Cluster Cluster;
typedef void (*Kernel)(Thread *t, const u8 *parameters);
typedef enum { READ, WRITE, ATOMIC } Access;

/* Global memory that a launch may access. */
typedef struct {
    u64 start, bytes;
    u32 writable;
} Range;

/* Synchronization of threads, and reads and copies of shared memory. a to d are documented in trace.py. */
typedef enum {
    TRACE_INIT, TRACE_ARRIVE, TRACE_WAIT, TRACE_LOAD, TRACE_WGMMA, TRACE_COMMIT, TRACE_WGMMA_WAIT, TRACE_BARRIER,
    TRACE_BARRIER_ARRIVE, TRACE_WARP, TRACE_CLUSTER_ARRIVE, TRACE_CLUSTER_WAIT, TRACE_READ
} TraceKind;

typedef struct {
    u32 kind, rank, thread, line, a, b, c, d;
} TraceEvent;

/* A launch. emulator.py declares the same structure. */
typedef struct {
    u32 grid[3], block[3], cluster[3];
    u32 static_shared, dynamic_shared, stack_bytes, ranges_count, regions_count;
    const Range *ranges;
    const Range *regions; /* of memory that blocks share, each once; `writable` is unused */
    u32 races;          /* happens-before detection on shared memory, and between blocks on global memory */
    u32 schedule;       /* of threads and of blocks: 0 forward, 1 reverse, 2 random */
    u32 copies;         /* 0 eager, 1 late, 2 random */
    u32 accumulation;   /* 0 float32, 1 hopper */
    u32 uses_cp_async;  /* the kernel has instructions of these kinds */
    u32 uses_async_proxy;
    u32 registers;      /* of a thread at entry; 0: unknown, and setmaxnreg has no effect */
    u32 parameters_bytes;
    u32 strict; /* checks rules that not all compilers follow; see emulator.py */
    u64 seed;
    TraceEvent *trace; /* of a launch of one cluster; or null */
    u32 trace_capacity, trace_count;
    char error[4000];
} Launch;

struct Thread {
    Warp *warp;
    Block *block;
    const Launch *launch;
    u32 tid[3], number, lane; /* `number` counts the threads of the block */
    u32 turns;                /* of its loops */
    u32 line;                 /* of the PTX, of the last instruction with an effect outside registers */
    u32 last_fence;           /* when it last executed fence.proxy.async, in fences of the cluster */
    u32 last_barrier_fence;   /* the same for fence.mbarrier_init */
    u32 cluster_arrival;      /* the generation of the cluster's barrier at which it arrived, plus 1 */
    u32 wgmma_done;           /* groups of wgmma that it has waited for */
    bool wgmma_fenced;        /* since its last wait for a wgmma, or its start */
    u32 bulk_groups;          /* groups of bulk copies that it has committed */
    enum { READY, SPINNING, WAITING, DONE } state;
    const u32 *counter; /* WAITING: until *counter differs from seen */
    u32 seen;
    const char *waits_for;
    const u8 *stored;   /* the bytes that an st is about to write */
    void *stack, *stack_pointer;
    struct CopyQueue *copies; /* its cp.async in flight */
};

struct Warp {
    Block *block;
    u32 id, live; /* `live` is the mask of lanes that have not exited */
    u32 meeting_line, met; /* lanes that reached the aligned instruction at that line */
    u32 meetings_done;     /* how often all lanes reached it */
    u32 registers;         /* of each of its threads */
    u32 register_changes, register_history; /* executed setmaxnreg: number and hash */
    bool changes_registers;                 /* while one of its lanes executes setmaxnreg */
    u32 open;              /* mask of its unfinished meetings, at instructions with a mask of lanes */
    struct Meeting *meetings;
};

struct Block {
    Cluster *cluster;
    u32 id[3], rank, threads_count, live;
    u8 *shared;
    u32 shared_bytes;
    u64 first_shared; /* its first shared address */
    Thread *threads;
    Warp *warps;
    u32 free_registers, registers_returned; /* in the pool of setmaxnreg; how often warps returned some */
    struct Barrier *barriers;
    struct Warpgroup *warpgroups;
    u32 warpgroups_count;
    struct MbarrierTable *mbarriers;
    struct Shadow *shadow;
    u32 *writers; /* per byte: the last writer through the generic proxy, and when; see memory.c */
};

__attribute__((noreturn, cold)) void rt_fail(Thread *t, const char *format, ...);
__attribute__((noreturn)) void rt_exit(Thread *t);
void rt_spin(Thread *t, const char *what);

#define LARGEST_TURNS (1u << 29) /* iterations of a thread: about half a second, and more than any kernel needs */

/* At the end of a loop's body. */
static inline void turn(Thread *t)
{
    if (unlikely(++t->turns > LARGEST_TURNS))
        rt_fail(t, "loops of more than %u turns: this one does not end", LARGEST_TURNS);
}

/* Memory. Each checks an access and returns its address on the host. `shared_at` is for shared::cta. */
__attribute__((cold)) u8 *rt_remote_shared(Thread *t, u64 address, u32 bytes, Access access);
__attribute__((noreturn, cold)) void rt_shared_fault(Thread *t, u64 address, u32 bytes, Access access);
u8 *rt_global_slow(Thread *t, u64 address, u32 bytes, Access access, u32 *hit);
u8 *rt_generic_slow(Thread *t, u64 address, u32 bytes, Access access, u32 *hit);
void rt_shared_access(Thread *t, Block *block, u32 offset, u32 bytes, Access access);
u64 rt_generic_to_shared(Thread *t, u64 address);
u64 rt_shared_to_generic(Thread *t, u64 address);
bool rt_is_shared(Thread *t, u64 address);
u64 rt_parameter_to_generic(Thread *t, u64 address);
u64 rt_generic_to_parameter(Thread *t, u64 address);
u64 rt_map_shared_rank(Thread *t, u64 address, u32 rank, bool generic);

static inline u8 *shared_at(Thread *t, u64 address, u32 bytes, Access access)
{
    Block *block = t->block;
    u64 offset = address - block->first_shared;
    if (unlikely(offset > block->shared_bytes || bytes > block->shared_bytes - offset || address & (bytes - 1)))
        rt_shared_fault(t, address, bytes, access);
    if (unlikely(block->shadow || block->writers))
        rt_shared_access(t, block, (u32)offset, bytes, access);
    return block->shared + offset;
}

/* Of any block of the cluster. */
static inline u8 *cluster_shared_at(Thread *t, u64 address, u32 bytes, Access access)
{
    if (address >> RANK_SHIFT != t->block->first_shared >> RANK_SHIFT)
        return rt_remote_shared(t, address, bytes, access);
    return shared_at(t, address, bytes, access);
}

/* `hit`, one per instruction, is the index of the range of its last access. */
static inline bool in_range(Thread *t, u64 address, u32 bytes, Access access, const u32 *hit)
{
    const Range *range = &t->launch->ranges[*hit];
    u64 offset = address - range->start;
    return offset < range->bytes && bytes <= range->bytes - offset && !(address & (bytes - 1)) &&
           (access == READ || range->writable);
}

static inline u8 *global_at(Thread *t, u64 address, u32 bytes, Access access, u32 *hit)
{
    if (likely(in_range(t, address, bytes, access, hit)))
        return (u8 *)address;
    return rt_global_slow(t, address, bytes, access, hit);
}

static inline u8 *generic_at(Thread *t, u64 address, u32 bytes, Access access, u32 *hit)
{
    if (likely(in_range(t, address, bytes, access, hit)))
        return (u8 *)address;
    return rt_generic_slow(t, address, bytes, access, hit);
}

static inline u8 *local_at(Thread *t, u64 address, u32 bytes, u8 *depot, u32 depot_bytes)
{
    u64 offset = address - (u64)depot;
    if (unlikely(offset > depot_bytes || bytes > depot_bytes - offset))
        rt_fail(t, "out-of-bounds access of %u bytes at %lld of %u bytes of local memory",
                bytes, (long long)offset, depot_bytes);
    if (unlikely(address & (bytes - 1)))
        rt_fail(t, "misaligned local access of %u bytes", bytes);
    return (u8 *)address;
}

/* Kinds of accesses for races between blocks. A strong access is relaxed, volatile, acquire or release. */
typedef enum { PLAIN_READ, CONSTANT_READ, STRONG_READ, PLAIN_WRITE, ATOMIC_WRITE } GlobalAccess;
void rt_global_access(Thread *t, const void *address, u32 bytes, GlobalAccess access);
void rt_global_release(Thread *t);
void rt_global_acquire(Thread *t);

/* Barriers */
void rt_bar_sync(Thread *t, u32 id, u32 count, bool aligned);
void rt_bar_arrive(Thread *t, u32 id, u32 count, bool aligned);
u32 rt_bar_reduce(Thread *t, u32 id, u32 count, bool aligned, u32 predicate, int operation);
void rt_cluster_arrive(Thread *t, bool aligned, bool release);
void rt_cluster_wait(Thread *t, bool aligned, bool acquire);
void rt_proxy_fence(Thread *t);
void rt_barrier_init_fence(Thread *t);
void rt_set_registers(Thread *t, u32 count, bool increase);

/* Warps */
enum { SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_BUTTERFLY, SHUFFLE_INDEX };
enum { VOTE_ALL, VOTE_ANY, VOTE_UNIFORM, VOTE_BALLOT };
enum { REDUCE_ADD, REDUCE_MIN_S, REDUCE_MAX_S, REDUCE_MIN_U, REDUCE_MAX_U, REDUCE_AND, REDUCE_OR, REDUCE_XOR };

typedef struct {
    u32 value, source, clamp;
    int mode;
    u32 result;
    bool in_range;
} Shuffle;
void rt_shuffle(Thread *t, u32 mask, Shuffle *shuffle);
u32 rt_vote(Thread *t, u32 mask, u32 predicate, int operation);
u32 rt_match_any(Thread *t, u32 mask, u64 value);
u32 rt_redux(Thread *t, u32 mask, u32 value, int operation);
u32 rt_elect(Thread *t, u32 mask, u32 *leader);
void rt_warp_sync(Thread *t, u32 mask);
void rt_converge(Thread *t);

/* Matrices */
typedef enum { E4M3, E5M2, BF16, F16 } Element;

typedef struct {
    Thread *thread;
    u64 address;
    u32 registers[4];
    int count;
    bool transpose, store;
} MatrixMove;
void rt_move_matrices(Thread *t, MatrixMove *move);

typedef struct {
    Element a_type, b_type;
    u32 a[4], b[2];
    float c[4], d[4];
} Mma;
void rt_mma(Thread *t, Mma *mma);

/* Registers of one function: first those that a wgmma writes, with their `results`, then copies of them. */
typedef struct {
    u32 value, group, line, shape; /* `group`: of the wgmma in flight, counted from 1, or 0 */
} Result;
typedef struct {
    u32 *registers;
    Result *results;
    u32 count, written;
} Accumulators;

#define IN_FLIGHT 0xfff00000u /* plus an index: a NaN in the register of that index until its wgmma is done */
__attribute__((noreturn, cold)) void rt_in_flight(Thread *t, const Accumulators *accumulators, u32 mark, u32 line);

static inline u32 settled(Thread *t, const Accumulators *accumulators, u32 number, u32 line)
{
    u32 bits = accumulators->registers[number];
    if (unlikely(bits - IN_FLIGHT < accumulators->written))
        rt_in_flight(t, accumulators, bits, line);
    return bits;
}

typedef struct {
    Thread *thread;
    Element a_type, b_type;
    int n;
    Accumulators *accumulators;
    const u16 *registers; /* n / 2 of them */
    u32 *values;          /* inputs, then results */
    bool a_in_registers, keep, negate_a, negate_b;
    u32 a[4];
    u64 a_descriptor, b_descriptor;
} Wgmma;
void rt_wgmma(Thread *t, Wgmma *wgmma);
void rt_wgmma_fence(Thread *t);
void rt_wgmma_commit(Thread *t);
void rt_wgmma_wait(Thread *t, u32 pending, Accumulators *accumulators);

/* mbarriers */
void rt_mbarrier_init(Thread *t, u64 address, u32 count);
void rt_mbarrier_invalidate(Thread *t, u64 address);
typedef enum { RELAXED, RELEASE_CTA, RELEASE_CLUSTER } Release;
u64 rt_mbarrier_arrive(Thread *t, u64 address, u32 count, u32 expected_bytes, bool in_cluster, Release release);
void rt_mbarrier_expect(Thread *t, u64 address, u32 bytes, bool in_cluster);
bool rt_mbarrier_test(Thread *t, u64 address, u32 parity, bool may_block, bool acquire);

/* Asynchronous copies */
void rt_cp_async(Thread *t, u64 target, u64 source, u32 bytes, u32 source_bytes, u32 *hit);
void rt_cp_async_commit(Thread *t);
void rt_cp_async_wait(Thread *t, u32 pending);
void rt_tensor_load(Thread *t, u64 target, u64 map, const s32 *corner, u32 rank, u64 mbarrier, bool multicast,
                    u16 blocks);
void rt_tensor_store(Thread *t, u64 map, const s32 *corner, u32 rank, u64 source, bool add);
void rt_bulk_load(Thread *t, u64 target, u64 source, u32 bytes, u64 mbarrier, bool multicast, u16 blocks);
void rt_bulk_store(Thread *t, u64 target, u64 source, u32 bytes, bool add);
void rt_bulk_between_blocks(Thread *t, u64 target, u64 source, u32 bytes, u64 mbarrier);
void rt_store_async(Thread *t, u64 target, const void *value, u32 bytes, u64 mbarrier);
void rt_bulk_commit(Thread *t);
void rt_bulk_wait(Thread *t, u32 pending, bool read);
