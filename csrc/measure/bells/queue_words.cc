// The operations on words of CUDA's queue, and the refusal of those that a driver lacks.
// SPDX-License-Identifier: Apache-2.0
#include "measure/bells/queue_words.h"

#include <type_traits>
#include <utility>

#include "cards/module/driver_library.h"
#include "measure/bells/cuda_queue_functions.h"

namespace dflash::measure {
namespace {

unsigned long long address(const void* memory) {
  return reinterpret_cast<unsigned long long>(memory);
}

class CudaQueueWords final : public QueueWords {
 public:
  explicit CudaQueueWords(uint64_t stream) : queue_(reinterpret_cast<void*>(stream)) {}

  Status open(const compute::gpu::DriverLibrary& library) {
#define DFLASH_FIND(member, name, type) DFLASH_TRY(library.find(#name, member));
    DFLASH_CUDA_QUEUE_FUNCTIONS(DFLASH_FIND)
#undef DFLASH_FIND
    return ok();
  }

  Status write(uint32_t* word, uint32_t value) override {
    return accepted(write_(queue_, address(word), value, 0), "stores of a stream");
  }
  Status await(const uint32_t* word, uint32_t value) override {
    return accepted(await_(queue_, address(word), value, cuda::kAwaitReached), "waits of a stream");
  }
  Status call_host(void (*function)(void*), void* argument) override {
    return accepted(call_host_(queue_, function, argument), "calls of the host by a stream");
  }

 private:
  Status accepted(int status, const char* what) const {
    if (status == 0) return ok();
    const char* found = nullptr;
    const bool has_text = text_(status, &found) == 0 && found != nullptr;
    return Error{ErrorCode::kUnsupported, std::string(what) +
                                              " failed: " + (has_text ? found : "unknown") +
                                              " (CUDA error " + std::to_string(status) + ")"};
  }

  void* const queue_;
#define DFLASH_MEMBER(member, name, type) std::add_pointer_t<type> member = nullptr;
  DFLASH_CUDA_QUEUE_FUNCTIONS(DFLASH_MEMBER)
#undef DFLASH_MEMBER
};

class NoQueueWords final : public QueueWords {
 public:
  explicit NoQueueWords(std::string backend) : backend_(std::move(backend)) {}
  Status write(uint32_t*, uint32_t) override { return refused("stores of a stream"); }
  Status await(const uint32_t*, uint32_t) override { return refused("waits of a stream"); }
  Status call_host(void (*)(void*), void*) override {
    return refused("calls of the host by a stream");
  }

 private:
  Error refused(const char* what) const {
    return Error{ErrorCode::kUnsupported, backend_ + " is not used for " + what};
  }
  const std::string backend_;
};

}  // namespace

Result<std::unique_ptr<QueueWords>> open_cuda_queue_words(
    const compute::gpu::DeviceRuntime& runtime, const std::string& library) {
  auto opened = compute::gpu::DriverLibrary::open({library});
  if (!opened.ok()) return std::move(opened).error();
  auto words = std::make_unique<CudaQueueWords>(runtime.stream());
  DFLASH_TRY(words->open(opened.value()));
  return std::unique_ptr<QueueWords>(std::move(words));
}

std::unique_ptr<QueueWords> no_queue_words(const std::string& backend) {
  return std::make_unique<NoQueueWords>(backend);
}

}  // namespace dflash::measure
