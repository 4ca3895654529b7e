// The functions of CUDA's driver API behind QueueWords, declared as in cuda.h with handles and
// enumerations by their size. A test compares them with the vendor's header where one is installed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

// X(member, name, type)
#define DFLASH_CUDA_QUEUE_FUNCTIONS(X)                                                   \
  X(write_, cuStreamWriteValue32_v2, int(void*, unsigned long long, unsigned, unsigned)) \
  X(await_, cuStreamWaitValue32_v2, int(void*, unsigned long long, unsigned, unsigned))  \
  X(call_host_, cuLaunchHostFunc, int(void*, void (*)(void*), void*))                    \
  X(text_, cuGetErrorString, int(int, const char**))

namespace dflash::measure::cuda {

// This is CU_STREAM_WAIT_VALUE_GEQ, which compares by the sign of the difference.
inline constexpr unsigned kAwaitReached = 0;

}  // namespace dflash::measure::cuda
