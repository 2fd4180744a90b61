// D = A Bᵀ of FP8 matrices [M, K] and [N, K], with what CUTLASS's collective builder makes of it for Hopper: once as a kernel,
// whose PTX is kept, and once as the host's side, which fills the kernel's parameters. No card and no driver are needed: tensor
// maps are encoded by a stand-in, which notes what it is asked for.
#include <cuda.h>
#include <cstring>

#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"

using namespace cute;

#ifdef COOPERATIVE
using BlockTile = Shape<_128, _128, _128>;
using MainloopSchedule = cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum;
using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecializedCooperative;
#elif defined(PROMOTED)
using BlockTile = Shape<_64, _128, _128>;
using MainloopSchedule = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
#else
using BlockTile = Shape<_64, _128, _128>;
using MainloopSchedule = cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum;
using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
#endif
using Cluster = Shape<_2, _1, _1>;
using Operand = cutlass::float_e4m3_t;
using Result = cutlass::bfloat16_t;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, BlockTile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto,
    float, float, void, RowMajor, 8, Result, RowMajor, 8, EpilogueSchedule>::CollectiveOp;
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Operand, RowMajor, 16, Operand, ColumnMajor, 16, float, BlockTile,
    Cluster, cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>,
    MainloopSchedule>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue>;

// What the stand-in writes in the place of a tensor map; foreign/cutlass/run.py reads it.
struct NotedMap {
    uint64_t magic, address, strides[4]; // of bytes, innermost one left out
    uint32_t dims[5], rank, type, swizzle, element_strides_are_one;
    uint16_t box[5];
};
static_assert(sizeof(NotedMap) <= sizeof(CUtensorMap), "a tensor map has 128 bytes");

extern "C" CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                           const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                           const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill)
{
    NotedMap noted = {};
    noted.magic = 0x70616d6465746f6eull;
    noted.address = (uint64_t)address;
    noted.rank = rank;
    noted.type = type;
    noted.swizzle = swizzle;
    noted.element_strides_are_one = interleave == CU_TENSOR_MAP_INTERLEAVE_NONE;
    for (uint32_t i = 0; i < rank; i++) {
        noted.dims[i] = (uint32_t)dims[i];
        noted.box[i] = (uint16_t)box[i];
        noted.element_strides_are_one &= element_strides[i] == 1;
        if (i + 1 < rank)
            noted.strides[i] = strides[i];
    }
    memset(map, 0, sizeof *map);
    memcpy(map, &noted, sizeof noted);
    return CUDA_SUCCESS;
}

// Fills `params` and the launch's shape, {grid, block, bytes of shared memory}. Returns the parameters' size, 0 if they are
// more than `capacity` or the problem is not for this kernel.
extern "C" size_t fill(void *a, void *b, void *d, int m, int n, int k, int processors, void *params, size_t capacity,
                       uint32_t *shape)
{
    using namespace cutlass;
    KernelHardwareInfo hardware;
    hardware.device_id = 0;
    hardware.sm_count = processors;
    hardware.max_active_clusters = processors / 2;
    typename Kernel::Arguments arguments{
        gemm::GemmUniversalMode::kGemm,
        {m, n, k, 1},
        {(Operand *)a, make_cute_packed_stride(typename Kernel::StrideA{}, {m, k, 1}), (Operand *)b,
         make_cute_packed_stride(typename Kernel::StrideB{}, {n, k, 1})},
        {{1.f, 0.f}, nullptr, make_cute_packed_stride(typename Kernel::StrideC{}, {m, n, 1}), (Result *)d,
         make_cute_packed_stride(typename Kernel::StrideD{}, {m, n, 1})},
        hardware};
    if (!Kernel::can_implement(arguments) || Kernel::get_workspace_size(arguments) > 0)
        return 0;
    auto filled = Kernel::to_underlying_arguments(arguments, nullptr);
    dim3 grid = Kernel::get_grid_shape(filled), block = Kernel::get_block_shape();
    const uint32_t launch[] = {grid.x, grid.y, grid.z, block.x, block.y, block.z, (uint32_t)Kernel::SharedStorageSize};
    memcpy(shape, launch, sizeof launch);
    if (sizeof filled > capacity)
        return 0;
    memcpy(params, &filled, sizeof filled);
    return sizeof filled;
}

// Makes the compiler emit the kernel.
extern "C" const void *kernel() { return (const void *)&cutlass::device_kernel<Kernel>; }
