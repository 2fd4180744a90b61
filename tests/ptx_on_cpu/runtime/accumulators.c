/* Registers that a wgmma writes hold a mark until wgmma.wait_group, since reading them before is undefined (PTX ISA,
 * wgmma.mma_async). A mov copies the mark: compilers emit movs between two wgmma. */
#include "internal.h"

void rt_in_flight(Thread *t, const Accumulators *accumulators, u32 mark, u32 line)
{
    const Result *result = &accumulators->results[mark - IN_FLIGHT];
    t->line = line;
    if (!result->group)
        rt_fail(t, "a copy of an accumulator is read that was made before wgmma.wait_group");
    rt_fail(t, "an accumulator of the wgmma in PTX line %u is read before wgmma.wait_group", result->line);
}

/* The register's value for the next wgmma. For a wgmma in flight of the same shape, it is the future result. */
static u32 taken(Thread *t, const Accumulators *accumulators, u32 number, u32 shape)
{
    u32 home = accumulators->registers[number] - IN_FLIGHT;
    if (home >= accumulators->count) {
        if (!t->wgmma_fenced)
            rt_fail(t, "wgmma.mma_async without wgmma.fence since its registers could be accessed");
        return accumulators->registers[number];
    }
    Result *result = &accumulators->results[home];
    if (!result->group)
        rt_in_flight(t, accumulators, IN_FLIGHT + home, t->line);
    if (result->shape != shape)
        rt_fail(t, "wgmma accumulates in a register of the wgmma in PTX line %u, which is in flight and has another "
                "shape", result->line);
    result->group = 0;
    return result->value;
}

void accumulators_take(Thread *t, const Wgmma *wgmma, u32 shape, u32 *values)
{
    for (int i = 0; i < wgmma->n / 2; i++)
        values[i] = taken(t, wgmma->accumulators, wgmma->registers[i], shape);
}

static void check_not_overwritten(Thread *t, const Accumulators *accumulators, u32 number)
{
    if (accumulators->registers[number] != IN_FLIGHT + number)
        rt_fail(t, "an accumulator of the wgmma in PTX line %u was overwritten before wgmma.wait_group",
                accumulators->results[number].line);
}

void accumulators_give(Thread *t, const Wgmma *wgmma, u32 shape, u32 group, const u32 *values)
{
    const Accumulators *accumulators = wgmma->accumulators;
    for (int i = 0; i < wgmma->n / 2; i++) {
        u32 number = wgmma->registers[i];
        if (accumulators->results[number].group)
            check_not_overwritten(t, accumulators, number);
        accumulators->results[number] = (Result){values[i], group, t->line, shape};
        accumulators->registers[number] = IN_FLIGHT + number;
    }
}

/* Writes the results of groups up to `done` to their registers. */
void accumulators_settle(Thread *t, Accumulators *accumulators, u32 done)
{
    bool any = false;
    for (u32 i = 0; i < accumulators->written; i++) {
        u32 group = accumulators->results[i].group;
        if (!group || group > done)
            continue;
        check_not_overwritten(t, accumulators, i);
        any = true;
    }
    if (!any)
        return;
    for (u32 i = 0; i < accumulators->count; i++) {
        u32 home = accumulators->registers[i] - IN_FLIGHT;
        if (home >= accumulators->written)
            continue;
        const Result *result = &accumulators->results[home];
        if (result->group && result->group <= done)
            accumulators->registers[i] = result->value;
    }
    for (u32 i = 0; i < accumulators->written; i++)
        if (accumulators->results[i].group <= done)
            accumulators->results[i].group = 0;
    t->wgmma_fenced = false;
}
