/* The record of a launch that Python reads; see trace.py. */
#include "internal.h"

void trace(const Thread *t, TraceKind kind, u32 a, u32 b, u32 c, u32 d)
{
    Launch *launch = (Launch *)t->launch;
    if (likely(!launch->trace))
        return;
    if (launch->trace_count < launch->trace_capacity)
        launch->trace[launch->trace_count] = (TraceEvent){kind, t->block->rank, t->number, t->line, a, b, c, d};
    launch->trace_count++;
}
