/* setmaxnreg: a block has as many registers as its threads have at entry, and its warps exchange them in a pool. */
#include "internal.h"

void registers_reset(Block *block)
{
    u32 warps = (block->threads_count + WARP - 1) / WARP;
    block->free_registers = 0;
    for (u32 i = 0; i < warps; i++)
        block->warps[i].registers = block->cluster->launch->registers;
}

static void take_and_return(Thread *t, u32 count, bool increase)
{
    Warp *warp = t->warp;
    Block *block = t->block;
    if (increase ? count < warp->registers : count > warp->registers)
        rt_fail(t, "setmaxnreg.%s to %u registers: the warp has %u", increase ? "inc" : "dec", count, warp->registers);
    while (increase && (count - warp->registers) * WARP > block->free_registers)
        wait_for_change(t, &block->registers_returned, block->registers_returned,
                        "registers in the block's pool (setmaxnreg)");
    block->free_registers += (warp->registers - count) * WARP;
    block->registers_returned += !increase;
    block->cluster->progress++;
    warp->registers = count;
}

void rt_set_registers(Thread *t, u32 count, bool increase)
{
    Warp *warp = t->warp;
    u32 seen = warp->register_changes;
    rt_converge(t);
    if (warp->register_changes != seen)
        return;
    if (warp->changes_registers) { /* one lane changes them for all */
        wait_for_change(t, &warp->register_changes, seen, "lanes of its warp");
        return;
    }
    warp->changes_registers = true;
    if (t->launch->registers)
        take_and_return(t, count, increase);
    warp->changes_registers = false;
    warp->register_changes++;
    warp->register_history = warp->register_history * 31 + 2 * count + increase;
}

/* All warps of a warpgroup have to make the same changes; in Triton's kernels they are different instructions. */
void registers_block_exits(Thread *last)
{
    const Block *block = last->block;
    for (u32 i = 0; i < (block->threads_count + WARP - 1) / WARP; i++)
        if (block->warps[i].register_history != block->warps[i / 4 * 4].register_history)
            rt_fail(last, "warps %u and %u of a warpgroup did not execute the same setmaxnreg", i / 4 * 4, i);
}
