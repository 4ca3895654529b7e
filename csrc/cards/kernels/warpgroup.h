// Products by warpgroups where this target has them: by PTX on sm_90a, by the simulator on the CPU.
// What both implement is written in warpgroup_layout.h.
//
// DFLASH_GPU_WARPGROUPS says whether this target has them. Elsewhere kernels that use them have no
// code, and no device says it could run them (DeviceFacts::has_warpgroups).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/warpgroup_layout.h"  // IWYU pragma: export

#if defined(DFLASH_GPU_SIM)
#define DFLASH_GPU_WARPGROUPS 1
#include "cards/kernels/warpgroup_sim.h"
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define DFLASH_GPU_WARPGROUPS 1
#include "cards/kernels/warpgroup_ptx.h"
#else
#define DFLASH_GPU_WARPGROUPS 0
#endif
