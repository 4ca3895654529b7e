// Every kernel of kernel_table.h, for the translation unit of a vendor (cards/entry/kernels.cu)
// and for the simulator's.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernel_table.h"
#include "cards/kernels/bf16_few.h"
#include "cards/kernels/bf16_many.h"
#include "cards/kernels/bf16_rows.h"
#include "cards/kernels/bf16_wgmma.h"
#include "cards/kernels/combine.h"
#include "cards/kernels/dot2_few.h"
#include "cards/kernels/dot2_many.h"
#include "cards/kernels/dot2_rows.h"
#include "cards/kernels/int8_few.h"
#include "cards/kernels/int8_many.h"
#include "cards/kernels/int8_rows.h"
#include "cards/kernels/project_few.h"
#include "cards/kernels/project_many.h"
#include "cards/kernels/route.h"
#include "cards/kernels/widen_rows.h"

namespace dflash::compute::gpu {

#define DFLASH_GPU_PROJECTION(kernel, stem, most_threads, enumerator, name) \
  kernel(dflash_##stem##_##name, ProjectionParams, most_threads) {          \
    stem<WeightFormat::enumerator>(params);                                 \
  }
DFLASH_GPU_FORMATS(DFLASH_GPU_PROJECTION, GPU_PAIRED_KERNEL, project_few, kFewThreads)
DFLASH_GPU_FORMATS(DFLASH_GPU_PROJECTION, GPU_KERNEL, project_many, kManyThreads)
DFLASH_GPU_INTEGER_FORMATS(DFLASH_GPU_PROJECTION, GPU_PAIRED_KERNEL, int8_few, kFewThreads)
DFLASH_GPU_INTEGER_FORMATS(DFLASH_GPU_PROJECTION, GPU_KERNEL, int8_many, kManyThreads)
DFLASH_GPU_FORMATS(DFLASH_GPU_PROJECTION, GPU_KERNEL, bf16_wgmma, kWgmmaThreads)
DFLASH_GPU_FORMATS(DFLASH_GPU_PROJECTION, GPU_PAIRED_KERNEL, dot2_few, kFewThreads)
DFLASH_GPU_FORMATS(DFLASH_GPU_PROJECTION, GPU_KERNEL, dot2_many, kManyThreads)
#undef DFLASH_GPU_PROJECTION
#define DFLASH_GPU_TILE_PROJECTION(kernel, stem, most_threads, enumerator, name) \
  kernel(dflash_##stem##_##name, ProjectionParams, most_threads) {               \
    DFLASH_GPU_TILES(stem, WeightFormat::enumerator)(params);                    \
  }
DFLASH_GPU_FORMATS(DFLASH_GPU_TILE_PROJECTION, GPU_PAIRED_KERNEL, bf16_few, kHalfFewThreads)
DFLASH_GPU_FORMATS(DFLASH_GPU_TILE_PROJECTION, GPU_KERNEL, bf16_many, kHalfManyThreads)
#undef DFLASH_GPU_TILE_PROJECTION

}  // namespace dflash::compute::gpu
