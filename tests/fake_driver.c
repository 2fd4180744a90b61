/* A CUDA driver that starts nothing: it notes what it was asked, so that launches are tested through NVIDIA's bindings. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int CUresult;

static struct {
    uint64_t kernel, stream, grid[3], block[3], shared, size;
    unsigned char parameters[512];
    char name[256];
    unsigned char code[4];
} noted;

const void *fake_driver_noted(void) { return &noted; }

CUresult cuInit(unsigned flags) { return 0; }

CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}

CUresult cuLibraryLoadData(void **library, const void *code, void *options, void *values, unsigned count,
                           void *library_options, void *library_values, unsigned library_count) {
    memcpy(noted.code, code, sizeof noted.code);
    *library = (void *)0x1234;
    return 0;
}

CUresult cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    if (library != (void *)0x1234) return 1;
    strncpy(noted.name, name, sizeof noted.name - 1);
    *kernel = (void *)0x4711;
    return 0;
}

CUresult cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, void *stream, void **parameters, void **extra) {
    /* CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END */
    if (parameters || extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4]) return 1;
    noted.kernel = (uint64_t)kernel, noted.stream = (uint64_t)stream, noted.shared = shared;
    noted.grid[0] = gx, noted.grid[1] = gy, noted.grid[2] = gz;
    noted.block[0] = bx, noted.block[1] = by, noted.block[2] = bz;
    noted.size = *(size_t *)extra[3];
    if (noted.size > sizeof noted.parameters) return 1;
    memcpy(noted.parameters, extra[1], noted.size);
    return 0;
}

CUresult cuMemsetD32Async(void *address, unsigned value, size_t count, void *stream) {
    if (value) return 1;
    noted.kernel = (uint64_t)address, noted.grid[0] = count, noted.stream = (uint64_t)stream;
    return 0;
}

typedef struct {
    uint64_t address, dims[2], pitch;
    uint32_t type, rank, box[2], steps[2], interleave, swizzle, promotion, outside;
} Map;

CUresult cuTensorMapEncodeTiled(Map *map, int type, unsigned rank, void *address, const uint64_t *dims,
                                const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                                int swizzle, int promotion, int outside) {
    if ((uintptr_t)map % 64 || rank != 2) return 1;
    *map = (Map){(uint64_t)address, {dims[0], dims[1]}, strides[0], type, rank, {box[0], box[1]}, {steps[0], steps[1]},
                 interleave, swizzle, promotion, outside};
    return 0;
}

static const struct {
    const char *name;
    void *function;
} entries[] = {
    {"cuInit", cuInit},
    {"cuDriverGetVersion", cuDriverGetVersion},
    {"cuLibraryLoadData", cuLibraryLoadData},
    {"cuLibraryGetKernel", cuLibraryGetKernel},
    {"cuLaunchKernel", cuLaunchKernel},
    {"cuMemsetD32Async", cuMemsetD32Async},
};

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (!strcmp(name, entries[i].name)) {
            *function = entries[i].function;
            if (status) *status = 0;
            return 0;
        }
    *function = NULL;
    if (status) *status = 1;
    return 500;
}
