/* wgmma: the four warps of a warpgroup multiply matrices in shared memory. */
#include "races.h"
#include <stdlib.h>

#define ROW_BYTES 32 /* of K in one instruction, of either operand */
#define LARGEST_N 256
#define LARGEST_K 32

struct Warpgroup {
    u32 arrived, generation, line;
    u32 committed; /* groups */
    bool open;     /* instructions after the last commit */
    void *arguments[WARPGROUP];
    u32 *known;
};

struct Warpgroup *warpgroups_new(const Races *races, u32 count)
{
    struct Warpgroup *groups = calloc(count, sizeof *groups);
    for (u32 i = 0; i < count; i++)
        groups[i].known = clock_new(races);
    return groups;
}

void warpgroups_reset(struct Warpgroup *groups, u32 count)
{
    for (u32 i = 0; i < count; i++) {
        groups[i].arrived = groups[i].committed = 0;
        groups[i].open = false;
    }
}

void warpgroups_free(struct Warpgroup *groups, u32 count)
{
    for (u32 i = 0; groups && i < count; i++)
        free(groups[i].known);
    free(groups);
}

static struct Warpgroup *group_of(const Thread *t)
{
    return &t->block->warpgroups[t->number / WARPGROUP];
}

typedef void (*GroupTogether)(Thread *t, struct Warpgroup *group);

/* Waits for the 128 threads; the last one calls `together`. */
static void meet_group(Thread *t, void *argument, GroupTogether together)
{
    struct Warpgroup *group = group_of(t);
    if (group->arrived && group->line != t->line)
        rt_fail(t, "divergence: threads of one warpgroup are at PTX line %u and PTX line %u", group->line, t->line);
    if (t->number / WARPGROUP * WARPGROUP + WARPGROUP > t->block->threads_count)
        rt_fail(t, "wgmma in a warpgroup of less than %u threads", WARPGROUP);
    group->line = t->line;
    group->arguments[t->number % WARPGROUP] = argument;
    t->block->cluster->progress++;
    if (++group->arrived < WARPGROUP) {
        wait_for_change(t, &group->generation, group->generation, "threads of its warpgroup");
        return;
    }
    together(t, group);
    group->arrived = 0;
    group->generation++;
}

#define RESERVED (3ull << 14 | 3ull << 30 | 7ull << 46 | 0x3ffull << 52)

/* PTX ISA, "Matrix Descriptor Format": an address has 18 bits. A K-major operand that is swizzled is no wider than its
 * swizzle, so its leading dimension is unused, and has to be 0 or 1. */
static void check_descriptor(Thread *t, u64 descriptor)
{
    u64 leading = descriptor >> 16 & 0x3fff, swizzle = descriptor >> 62, base = descriptor >> 49 & 7;
    if (descriptor & RESERVED)
        rt_fail(t, "the matrix descriptor 0x%llx has reserved bits set, 0x%llx: an address is (address & 0x3ffff) >> 4",
                (unsigned long long)descriptor, (unsigned long long)(descriptor & RESERVED));
    if (swizzle && leading > 1)
        rt_fail(t, "the matrix descriptor 0x%llx is swizzled and has a leading dimension offset of %llu, not 0 or 1: an "
                "address is (address & 0x3ffff) >> 4", (unsigned long long)descriptor, (unsigned long long)leading);
    if (base && !swizzle)
        rt_fail(t, "the matrix descriptor 0x%llx has a base offset, but no swizzle", (unsigned long long)descriptor);
    if (base)
        rt_fail(t, "limit of the emulator: a matrix descriptor with a base offset");
}

/* The address of 16 bytes of a row by a K-major matrix descriptor, with 14-bit fields in units of 16 bytes. */
static u32 descriptor_address(u64 descriptor, u32 row, u32 byte)
{
    u32 start = (u32)(descriptor & 0x3fff) << 4;
    u32 leading = (u32)(descriptor >> 16 & 0x3fff) << 4;
    u32 stride = (u32)(descriptor >> 32 & 0x3fff) << 4;
    u32 group = start + row / 8 * stride;
    u32 address;
    switch (descriptor >> 62) {
    case 1:
        address = group + row % 8 * 128 + byte;
        return address ^ (address >> 7 & 7) << 4;
    case 2:
        address = group + row % 8 * 64 + byte;
        return address ^ (address >> 7 & 3) << 4;
    case 3:
        address = group + row % 8 * 32 + byte;
        return address ^ (address >> 7 & 1) << 4;
    default:
        return group + byte / 16 * leading + row % 8 * 16 + byte % 16;
    }
}

static void load_operand(Thread *t, struct Warpgroup *group, u64 descriptor, u32 rows, Element type, float *values)
{
    u32 size = type == E4M3 || type == E5M2 ? 1 : 2;
    u32 k = ROW_BYTES / size;
    Block *block = t->block;
    check_descriptor(t, descriptor);
    for (u32 row = 0; row < rows; row++) {
        for (u32 byte = 0; byte < ROW_BYTES; byte += 16) {
            u64 address = (u64)block->rank << RANK_SHIFT | descriptor_address(descriptor, row, byte);
            u32 offset = own_window(t, address, 16, 16);
            check_proxy_fence(t, block, offset, 16, "wgmma");
            race_wgmma(t, group->known, offset, 16, group->committed);
            const u8 *source = block->shared + offset;
            for (u32 i = 0; i < 16 / size; i++) {
                u16 bits = source[size * i];
                if (size == 2)
                    memcpy(&bits, source + 2 * i, sizeof bits);
                values[row * k + byte / size + i] = element_value(type, bits);
            }
        }
    }
}

/* The joined clocks of all four warps: the multiplication starts after all that each of them waited for. */
static void learn_common_knowledge(Thread *t, struct Warpgroup *group)
{
    const Races *races = t->block->cluster->races;
    if (!races)
        return;
    Thread *first = t - t->number % WARPGROUP;
    clock_clear(races, group->known);
    clock_join(races, group->known, race_knowledge(first));
    for (u32 i = 1; i < WARPGROUP; i++)
        clock_meet(races, group->known, race_knowledge(first + i));
}

static void check_uniform(Wgmma *const *lanes)
{
    const Wgmma *first = lanes[0];
    for (u32 i = 1; i < WARPGROUP; i++) {
        const Wgmma *other = lanes[i];
        bool same_a = first->a_in_registers || other->a_descriptor == first->a_descriptor;
        if (!same_a || other->b_descriptor != first->b_descriptor || other->keep != first->keep)
            rt_fail(other->thread, "wgmma with a descriptor or scale-d that differs between threads of the warpgroup");
    }
}

/* The thread and register of row `row` and column `column` of the accumulator. */
static u32 *accumulator(Wgmma *const *lanes, int row, int column)
{
    int thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
    return &lanes[thread]->values[column / 8 * 4 + row % 16 / 8 * 2 + column % 2];
}

static void negate(float *values, int count)
{
    for (int i = 0; i < count; i++)
        values[i] = -values[i];
}

/* A row times the columns of B, which is transposed in memory: the compiler vectorizes over the columns. */
static void multiply_row(const float *row, const float *transposed, int n, int k, float *sums)
{
    memset(sums, 0, n * sizeof(float));
    for (int i = 0; i < k; i++)
        for (int column = 0; column < n; column++)
            sums[column] += row[i] * transposed[i * n + column];
}

/* K of one instruction. */
static int depth(const Wgmma *wgmma)
{
    return wgmma->a_type == E4M3 || wgmma->a_type == E5M2 ? 32 : 16;
}

static void multiply_group(Thread *t, struct Warpgroup *group)
{
    static float a[64 * LARGEST_K], b[LARGEST_N * LARGEST_K], transposed[LARGEST_K * LARGEST_N];
    Wgmma *const *lanes = (Wgmma **)group->arguments;
    const Wgmma *first = lanes[0];
    const Launch *launch = t->launch;
    bool fp8 = first->a_type == E4M3 || first->a_type == E5M2;
    int n = first->n, k = depth(first);
    check_uniform(lanes);
    learn_common_knowledge(t, group);
    group->open = true;
    load_operand(t, group, first->b_descriptor, n, first->b_type, b);
    if (first->a_in_registers) {
        for (u32 i = 0; i < WARPGROUP; i++)
            unpack_a(lanes[i]->a, i % WARP, first->a_type, a + i / WARP * 16 * k, k);
    } else {
        load_operand(t, group, first->a_descriptor, 64, first->a_type, a);
    }
    if (first->negate_a)
        negate(a, 64 * k);
    if (first->negate_b)
        negate(b, n * k);
    for (int column = 0; column < n; column++)
        for (int i = 0; i < k; i++)
            transposed[i * n + column] = b[column * k + i];
    for (int row = 0; row < 64; row++) {
        float sums[LARGEST_N];
        if (!launch->accumulation || !fp8)
            multiply_row(a + row * k, transposed, n, k, sums);
        for (int column = 0; column < n; column++) {
            u32 *d = accumulator(lanes, row, column);
            float c = first->keep ? float_of(*d) : 0.f;
            if (launch->accumulation && fp8)
                *d = bits_of(multiply_accumulate(launch, first->a_type, c, a + row * k, b + column * k, k));
            else
                *d = bits_of(c + sums[column]);
        }
    }
}

void rt_wgmma(Thread *t, Wgmma *wgmma)
{
    u32 values[LARGEST_N / 2], shape = (u32)wgmma->n << 8 | (u32)depth(wgmma);
    u32 a = wgmma->a_in_registers ? ~0u : descriptor_address(wgmma->a_descriptor, 0, 0) - SHARED_BASE;
    trace(t, TRACE_WGMMA, a, 64 * 128, descriptor_address(wgmma->b_descriptor, 0, 0) - SHARED_BASE, wgmma->n * 128);
    wgmma->thread = t;
    wgmma->values = values;
    if (wgmma->a_in_registers && !t->wgmma_fenced)
        rt_fail(t, "wgmma.mma_async without wgmma.fence since its registers could be accessed");
    accumulators_take(t, wgmma, shape, values);
    meet_group(t, wgmma, multiply_group);
    accumulators_give(t, wgmma, shape, group_of(t)->committed + 1, values);
}

void rt_wgmma_fence(Thread *t)
{
    rt_converge(t);
    t->wgmma_fenced = true;
}

static void commit_group(Thread *t, struct Warpgroup *group)
{
    (void)t;
    group->committed++;
    group->open = false;
}

void rt_wgmma_commit(Thread *t)
{
    trace(t, TRACE_COMMIT, 0, 0, 0, 0);
    meet_group(t, NULL, commit_group);
}

void rt_wgmma_wait(Thread *t, u32 pending, Accumulators *accumulators)
{
    struct Warpgroup *group = group_of(t);
    trace(t, TRACE_WGMMA_WAIT, pending, 0, 0, 0);
    rt_converge(t);
    if (group->committed < pending + t->wgmma_done)
        return;
    t->wgmma_done = group->committed - pending;
    race_wgmma_done(t, t->wgmma_done);
    if (accumulators)
        accumulators_settle(t, accumulators, t->wgmma_done);
}

void wgmma_thread_exits(Thread *t)
{
    const struct Warpgroup *group = group_of(t);
    if (group->open || t->wgmma_done < group->committed)
        rt_fail(t, "the thread exits while a wgmma is in flight: wgmma.commit_group or wgmma.wait_group is missing");
}
