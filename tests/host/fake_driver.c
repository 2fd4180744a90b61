/* A CUDA driver that starts nothing: it notes what it was asked, so that launches are tested through NVIDIA's bindings.

   As a real one it places each parameter where the kernel's machine code reads it, refuses a block of parameters of
   another size, and does nothing in a thread without a context. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int CUresult;

enum { SUCCESS, INVALID_VALUE, INVALID_CONTEXT = 201, NOT_FOUND = 500, OUT_OF_RESOURCES = 701 };

static struct {
    uint64_t kernel, stream, grid[3], block[3], shared;
    unsigned char parameters[4096];
    char name[4096];
    uint64_t launches, shared_limit;
} noted;

/* Of the kernel that is loaded next, from its machine code. */
static struct {
    uint64_t count, size, offsets[64], sizes[64];
} layout;

static _Thread_local void *context;

void *fake_driver_noted(void) { return &noted; }
void *fake_driver_layout(void) { return &layout; }

CUresult cuInit(unsigned flags) { return SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

CUresult cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal ? INVALID_VALUE : SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(void **primary, int device) {
    *primary = (void *)0xC0;
    return SUCCESS;
}

CUresult cuCtxGetCurrent(void **current) {
    *current = context;
    return SUCCESS;
}

CUresult cuCtxSetCurrent(void *wanted) {
    context = wanted;
    return wanted == (void *)0xC0 ? SUCCESS : INVALID_CONTEXT;
}

CUresult cuLibraryLoadData(void **library, const void *code, void *options, void *values, unsigned count,
                           void *library_options, void *library_values, unsigned library_count) {
    *library = (void *)0x1234;
    return memcmp(code, "\177ELF", 4) ? INVALID_VALUE : SUCCESS;
}

CUresult cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    if (library != (void *)0x1234) return INVALID_VALUE;
    strncpy(noted.name, name, sizeof noted.name - 1);
    *kernel = (void *)0x4711;
    noted.shared_limit = 48 * 1024;
    return SUCCESS;
}

CUresult cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
    if (attribute != 8 || kernel != (void *)0x4711) return INVALID_VALUE; /* ..._MAX_DYNAMIC_SHARED_SIZE_BYTES */
    noted.shared_limit = value;
    return SUCCESS;
}

CUresult cuKernelGetFunction(void **function, void *kernel) {
    *function = (void *)0x4712;
    return context && kernel == (void *)0x4711 ? SUCCESS : INVALID_VALUE;
}

CUresult cuFuncLoad(void *function) { return function == (void *)0x4712 ? SUCCESS : INVALID_VALUE; }

CUresult cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, void *stream, void **parameters, void **extra) {
    if (!context) return INVALID_CONTEXT;
    if (!parameters == !extra || kernel != (void *)0x4711 || shared > noted.shared_limit) return INVALID_VALUE;
    memset(noted.parameters, 0xEE, sizeof noted.parameters);
    if (parameters) {
        for (uint64_t i = 0; i < layout.count; i++)
            memcpy(noted.parameters + layout.offsets[i], parameters[i], layout.sizes[i]);
    } else { /* CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END */
        if (extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4]) return INVALID_VALUE;
        if (*(size_t *)extra[3] != layout.size) return OUT_OF_RESOURCES;
        memcpy(noted.parameters, extra[1], layout.size);
    }
    noted.kernel = (uint64_t)kernel, noted.stream = (uint64_t)stream, noted.shared = shared, noted.launches++;
    noted.grid[0] = gx, noted.grid[1] = gy, noted.grid[2] = gz;
    noted.block[0] = bx, noted.block[1] = by, noted.block[2] = bz;
    return SUCCESS;
}

CUresult cuMemsetD32Async(void *address, unsigned value, size_t count, void *stream) {
    if (!context) return INVALID_CONTEXT;
    if (value) return INVALID_VALUE;
    noted.kernel = (uint64_t)address, noted.grid[0] = count, noted.stream = (uint64_t)stream;
    return SUCCESS;
}

typedef struct {
    uint64_t address, dims[2], pitch;
    uint32_t type, rank, box[2], steps[2], interleave, swizzle, promotion, outside;
} Map;

CUresult cuTensorMapEncodeTiled(Map *map, int type, unsigned rank, void *address, const uint64_t *dims,
                                const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                                int swizzle, int promotion, int outside) {
    if ((uintptr_t)map % 64 || rank != 2) return INVALID_VALUE;
    *map = (Map){(uint64_t)address, {dims[0], dims[1]}, strides[0], type, rank, {box[0], box[1]}, {steps[0], steps[1]},
                 interleave, swizzle, promotion, outside};
    return SUCCESS;
}

#define ENTRY(function) {#function, function}
static const struct {
    const char *name;
    void *function;
} entries[] = {
    ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGet), ENTRY(cuDevicePrimaryCtxRetain),
    ENTRY(cuCtxGetCurrent), ENTRY(cuCtxSetCurrent), ENTRY(cuLibraryLoadData), ENTRY(cuLibraryGetKernel),
    ENTRY(cuKernelSetAttribute), ENTRY(cuKernelGetFunction), ENTRY(cuFuncLoad), ENTRY(cuLaunchKernel), ENTRY(cuMemsetD32Async),
};

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (!strcmp(name, entries[i].name)) {
            *function = entries[i].function;
            if (status) *status = 0;
            return SUCCESS;
        }
    *function = NULL;
    if (status) *status = 1;
    return NOT_FOUND;
}
