/* Fibers: threads of a cluster with their own stacks. */
#include "internal.h"
#include <stdlib.h>
#include <sys/mman.h>

#if !defined(__x86_64__)
#error "the emulator's fibers are written for x86-64"
#endif

/* Pushes the callee-saved registers and switches to another stack. */
void switch_stack(void **save, void *load);
__asm__(".text\n"
        ".globl switch_stack\n"
        ".type switch_stack, @function\n"
        "switch_stack:\n"
        "push %rbp\n"
        "push %rbx\n"
        "push %r12\n"
        "push %r13\n"
        "push %r14\n"
        "push %r15\n"
        "mov %rsp, (%rdi)\n"
        "mov %rsi, %rsp\n"
        "pop %r15\n"
        "pop %r14\n"
        "pop %r13\n"
        "pop %r12\n"
        "pop %rbx\n"
        "pop %rbp\n"
        "ret\n");
#define SAVED_REGISTERS 6

static struct {
    u8 *memory;
    u32 count, stack_bytes, free_count;
    void **free; /* last in, first out: a thread that never waits gets a stack that is in the CPU's cache */
    Thread *current;
    void *scheduler;
} fibers;

bool fibers_reserve(u32 count, u32 stack_bytes)
{
    if (fibers.count < count || fibers.stack_bytes != stack_bytes) {
        if (fibers.memory)
            munmap(fibers.memory, (size_t)fibers.count * fibers.stack_bytes);
        free(fibers.free);
        fibers.memory = mmap(NULL, (size_t)count * stack_bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (fibers.memory == MAP_FAILED) {
            fibers.memory = NULL;
            fibers.count = 0;
            fibers.free = NULL;
            return false;
        }
        fibers.count = count;
        fibers.stack_bytes = stack_bytes;
        fibers.free = malloc(count * sizeof *fibers.free);
    }
    fibers.free_count = fibers.count;
    for (u32 i = 0; i < fibers.count; i++)
        fibers.free[i] = fibers.memory + (size_t)(fibers.count - 1 - i) * stack_bytes;
    return true;
}

static void fiber_main(void)
{
    thread_main(fibers.current);
}

void fiber_start(Thread *t)
{
    u8 *stack = fibers.free[--fibers.free_count];
    u32 index = (u32)((size_t)(stack - fibers.memory) / fibers.stack_bytes);
    /* Stacks start at different cache lines, so that they are in different sets of the cache. */
    void **top = (void **)(stack + fibers.stack_bytes - 64 - index % 16 * 256);
    *--top = NULL;
    *--top = (void *)fiber_main;
    for (int i = 0; i < SAVED_REGISTERS; i++)
        *--top = NULL;
    t->stack = stack;
    t->stack_pointer = top;
}

void fiber_release(Thread *t)
{
    fibers.free[fibers.free_count++] = t->stack;
    t->stack = NULL;
}

void fiber_resume(Thread *t)
{
    fibers.current = t;
    switch_stack(&fibers.scheduler, t->stack_pointer);
}

void fiber_suspend(Thread *t)
{
    switch_stack(&t->stack_pointer, fibers.scheduler);
}
