// Stores, waits and calls of the host that a device's queue makes by itself, without a kernel: two
// of the ways to ring a processor. Not every driver has them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"
#include "cards/device_runtime.h"

namespace dflash::measure {

// The words of one runtime's own queue. The runtime must be current for the calling thread, which
// any of its operations achieves. All errors are kUnsupported with the driver's words, and the
// device goes on.
class QueueWords {
 public:
  virtual ~QueueWords() = default;
  // These queue, in turn: a store to a word that kernels may use; a wait until a word has reached
  // `value` (counting on from 2^32 - 1 to 0), which nothing else ends; and a call on a thread of
  // the vendor's, which must not use the device.
  virtual Status write(uint32_t* word, uint32_t value) = 0;
  virtual Status await(const uint32_t* word, uint32_t value) = 0;
  virtual Status call_host(void (*function)(void*), void* argument) = 0;
};

// The queue of NVIDIA's driver. Errors: kUnsupported where the library or a function is missing.
Result<std::unique_ptr<QueueWords>> open_cuda_queue_words(
    const compute::gpu::DeviceRuntime& runtime, const std::string& library = "libcuda.so.1");
// For a driver whose operations are not used; each of them is refused.
std::unique_ptr<QueueWords> no_queue_words(const std::string& backend);

}  // namespace dflash::measure
