// The table of the kernels of a device step, which is what a host's device is opened with. For host
// code only.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/device_exchange/step_params.h"
#include "cards/kernel_entries.h"

namespace dflash::device_exchange {

// Places in kExchangeKernels, and the order in which a call launches them.
inline constexpr compute::gpu::KernelId kPackRequests{0}, kAwaitReplies{1}, kCombineReplies{2};

inline constexpr compute::gpu::KernelEntry kExchangeKernels[] = {
    {"dflash_pack_requests",   sizeof(StepParams), 0},
    {"dflash_await_replies",   sizeof(StepParams), 0},
    {"dflash_combine_replies", sizeof(StepParams), 0},
};

}  // namespace dflash::device_exchange
