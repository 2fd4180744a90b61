#include "races.h"

/* An entry of Block.writers: the thread's number in the cluster plus 1, and the cluster's number of proxy fences. */
#define FENCE_BITS 17
#define FENCE_MASK ((1u << FENCE_BITS) - 1)

static const char *verb(Access access)
{
    return access == READ ? "read" : access == WRITE ? "write" : "atomic";
}

Block *block_of_rank(Thread *t, u64 rank)
{
    Cluster *cluster = t->block->cluster;
    if (rank >= cluster->blocks_count)
        rt_fail(t, "shared memory of block %llu in a cluster of %u", (unsigned long long)rank, cluster->blocks_count);
    Block *block = &cluster->blocks[rank];
    if (!block->live)
        rt_fail(t, "shared memory of block %u of the cluster, which has exited", block->rank);
    return block;
}

__attribute__((noreturn, cold)) static void shared_fault(Thread *t, const Block *block, u64 address, u32 bytes,
                                                         Access access)
{
    u32 size = block->shared_bytes;
    s64 offset = (s64)(address - block->first_shared);
    if (offset < 0 || offset + bytes > size)
        rt_fail(t, "out-of-bounds shared %s of %u bytes at byte %lld of %u",
                verb(access), bytes, (long long)offset, size);
    rt_fail(t, "misaligned shared %s of %u bytes at byte %lld", verb(access), bytes, (long long)offset);
}

void rt_shared_fault(Thread *t, u64 address, u32 bytes, Access access)
{
    u64 rank = address >> RANK_SHIFT;
    if (rank != t->block->rank && rank < t->block->cluster->blocks_count)
        rt_fail(t, "%s of %u bytes in shared::cta at 0x%llx, an address of the cluster's block %llu: block %u's own "
                "begin at 0x%llx", verb(access), bytes, (unsigned long long)address, (unsigned long long)rank,
                t->block->rank, (unsigned long long)t->block->first_shared);
    shared_fault(t, t->block, address, bytes, access);
}

static u32 checked_offset(Thread *t, const Block *block, u64 address, u32 bytes, u32 alignment)
{
    u64 offset = address - block->first_shared;
    bool inside = offset <= block->shared_bytes && bytes <= block->shared_bytes - offset;
    if (inside && !(offset & (alignment - 1)))
        return (u32)offset;
    if (block == t->block)
        rt_shared_fault(t, address, bytes, READ);
    shared_fault(t, block, address, bytes, READ);
}

/* The block and offset of an address of the shared::cluster window. Checks only bounds and alignment. */
Block *shared_window(Thread *t, u64 address, u32 bytes, u32 alignment, u32 *offset)
{
    u64 rank = address >> RANK_SHIFT;
    Block *block = rank == t->block->rank ? t->block : block_of_rank(t, rank);
    *offset = checked_offset(t, block, address, bytes, alignment);
    return block;
}

/* The same for shared::cta. */
u32 own_window(Thread *t, u64 address, u32 bytes, u32 alignment)
{
    return checked_offset(t, t->block, address, bytes, alignment);
}

u8 *rt_remote_shared(Thread *t, u64 address, u32 bytes, Access access)
{
    u32 offset;
    Block *block = shared_window(t, address, bytes, bytes, &offset);
    rt_shared_access(t, block, offset, bytes, access);
    return block->shared + offset;
}

void written_through_generic_proxy(Thread *t, Block *block, u32 offset, u32 bytes)
{
    if (!block->writers)
        return;
    u32 thread = (u32)(t - block->cluster->threads) + 1;
    u32 entry = thread << FENCE_BITS | (block->cluster->fences & FENCE_MASK);
    for (u32 i = 0; i < bytes; i++)
        block->writers[offset + i] = entry;
}

void rt_shared_access(Thread *t, Block *block, u32 offset, u32 bytes, Access access)
{
    race_thread(t, block, offset, bytes, access);
    if (access == READ)
        trace(t, TRACE_READ, offset, block->rank, bytes, 0);
    else
        written_through_generic_proxy(t, block, offset, bytes);
}

void written_through_async_proxy(Block *block, u32 offset, u32 bytes)
{
    if (block->writers)
        memset(block->writers + offset, 0, bytes * sizeof(u32));
}

/* The asynchronous proxy sees a generic write only after a fence of the writer, or of the thread that starts the copy. */
void check_proxy_fence(Thread *t, Block *block, u32 offset, u32 bytes, const char *reader)
{
    if (!block->writers || block->cluster->fences > FENCE_MASK)
        return;
    for (u32 i = offset; i < offset + bytes; i++) {
        u32 entry = block->writers[i];
        if (!entry)
            continue;
        const Thread *writer = &block->cluster->threads[(entry >> FENCE_BITS) - 1];
        u32 time = entry & FENCE_MASK;
        if (writer->last_fence <= time && t->last_fence <= time)
            rt_fail(t, "%s reads byte %u of shared memory, which thread %u wrote, with no fence.proxy.async in between",
                    reader, i, writer->number);
    }
}

Block *block_of_pointer(Cluster *cluster, const u8 *pointer)
{
    for (u32 i = 0; i < cluster->blocks_count; i++) {
        Block *block = &cluster->blocks[i];
        if (pointer >= block->shared && pointer < block->shared + block->shared_bytes)
            return block;
    }
    return NULL;
}

__attribute__((noreturn, cold)) static void global_fault(Thread *t, u64 address, u32 bytes, Access access)
{
    const Launch *launch = t->launch;
    if (address - PARAMETERS_BASE < launch->parameters_bytes)
        rt_fail(t, "%s of %u bytes at address 0x%llx of the parameter space: cvta.param is missing", verb(access), bytes,
                (unsigned long long)address);
    if (address < 4096)
        rt_fail(t, "%s of %u bytes through a null pointer (address %llu)",
                verb(access), bytes, (unsigned long long)address);
    u32 nearest = 0;
    s64 least = INT64_MAX;
    for (u32 i = 0; i < launch->ranges_count; i++) {
        const Range *range = &launch->ranges[i];
        if (!range->bytes)
            continue;
        u64 end = range->start + range->bytes;
        s64 distance = address < range->start ? (s64)(range->start - address) : (s64)(address + bytes - end);
        if (distance < least) {
            least = distance;
            nearest = i;
        }
    }
    const Range *range = &launch->ranges[nearest];
    rt_fail(t, "out-of-bounds global %s of %u bytes at byte %lld of argument %u, which has %llu bytes", verb(access),
            bytes, (long long)(address - range->start), nearest, (unsigned long long)range->bytes);
}

static bool find_range(Thread *t, u64 address, u32 bytes, Access access, u32 *hit)
{
    const Launch *launch = t->launch;
    if (bytes <= 16 && address & (bytes - 1))
        rt_fail(t, "misaligned %s of %u bytes at address 0x%llx", verb(access), bytes, (unsigned long long)address);
    for (u32 i = 0; i < launch->ranges_count; i++) {
        const Range *range = &launch->ranges[i];
        u64 offset = address - range->start;
        if (offset > range->bytes || bytes > range->bytes - offset)
            continue;
        if (access != READ && !range->writable)
            rt_fail(t, "%s of %u bytes to argument %u, which is read-only", verb(access), bytes, i);
        *hit = i;
        return true;
    }
    return false;
}

u8 *rt_global_slow(Thread *t, u64 address, u32 bytes, Access access, u32 *hit)
{
    if (!find_range(t, address, bytes, access, hit))
        global_fault(t, address, bytes, access);
    return (u8 *)address;
}

/* Checks a copy's source or target, of any length. */
void check_global(Thread *t, u64 address, u32 bytes, Access access, u32 *hit)
{
    const Range *range = &t->launch->ranges[*hit];
    u64 offset = address - range->start;
    if (offset < range->bytes && bytes <= range->bytes - offset && (access == READ || range->writable))
        return;
    rt_global_slow(t, address, bytes, access, hit);
}

u8 *rt_generic_slow(Thread *t, u64 address, u32 bytes, Access access, u32 *hit)
{
    u8 *pointer = (u8 *)address;
    Block *block = block_of_pointer(t->block->cluster, pointer);
    if (block) {
        u32 offset = (u32)(pointer - block->shared);
        if (bytes > block->shared_bytes - offset || offset & (bytes - 1))
            shared_fault(t, block, block->first_shared + offset, bytes, access);
        rt_shared_access(t, block, offset, bytes, access);
        return pointer;
    }
    if (is_parameter(t, address, bytes) && !(address & (bytes - 1))) {
        if (access != READ)
            rt_fail(t, "%s of %u bytes to the kernel's parameters", verb(access), bytes);
        return pointer;
    }
    if (pointer >= (u8 *)t->stack && pointer + bytes <= (u8 *)t->stack + t->launch->stack_bytes)
        return pointer;
    return rt_global_slow(t, address, bytes, access, hit);
}

bool rt_is_shared(Thread *t, u64 address)
{
    return block_of_pointer(t->block->cluster, (u8 *)address) != NULL;
}

u64 rt_generic_to_shared(Thread *t, u64 address)
{
    if (!address) /* CUTLASS converts null pointers to check their alignment; an access fails */
        return 0;
    Block *block = block_of_pointer(t->block->cluster, (u8 *)address);
    if (!block)
        rt_fail(t, "cvta.to.shared of address 0x%llx, which is not in shared memory", (unsigned long long)address);
    return block->first_shared + (u64)((u8 *)address - block->shared);
}

u64 rt_shared_to_generic(Thread *t, u64 address)
{
    Block *block = block_of_rank(t, address >> RANK_SHIFT);
    return (u64)(block->shared + (address - block->first_shared));
}

/* Generic addresses are the host's. */
bool is_parameter(const Thread *t, u64 address, u32 bytes)
{
    u64 offset = address - (u64)t->block->cluster->parameters;
    return offset < t->launch->parameters_bytes && bytes <= t->launch->parameters_bytes - offset;
}

u64 rt_parameter_to_generic(Thread *t, u64 address)
{
    u64 offset = address - PARAMETERS_BASE;
    if (offset >= t->launch->parameters_bytes)
        rt_fail(t, "cvta.param of address 0x%llx, which is not in the kernel's parameters", (unsigned long long)address);
    return (u64)t->block->cluster->parameters + offset;
}

u64 rt_generic_to_parameter(Thread *t, u64 address)
{
    if (!is_parameter(t, address, 1))
        rt_fail(t, "cvta.to.param of address 0x%llx, which is not in the kernel's parameters",
                (unsigned long long)address);
    return address - (u64)t->block->cluster->parameters + PARAMETERS_BASE;
}

u64 rt_map_shared_rank(Thread *t, u64 address, u32 rank, bool generic)
{
    u64 window = generic ? rt_generic_to_shared(t, address) : address;
    if (rank >= t->block->cluster->blocks_count)
        rt_fail(t, "mapa to block %u of a cluster of %u", rank, t->block->cluster->blocks_count);
    window = (u64)rank << RANK_SHIFT | (window & ((1u << RANK_SHIFT) - 1));
    return generic ? rt_shared_to_generic(t, window) : window;
}
