// The queue and the memory of a simulated device.
// SPDX-License-Identifier: Apache-2.0
#include "cards/sim/sim_runtime.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <new>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "base/float_mode.h"
#include "cards/sim/block.h"

namespace dflash::compute::gpu {
namespace {

constexpr size_t kAlignment = 256;
constexpr uint8_t kFreshByte = 0xcd;  // device memory is not zero at first
constexpr uint32_t kMaxGridY = 65535;

struct Operation {
  enum class Kind : uint8_t { kCopy, kFill, kLaunch, kMark } kind;
  std::byte* destination = nullptr;
  const std::byte* source = nullptr;
  uint64_t num_bytes = 0;
  uint8_t value = 0;
  KernelLaunch launch{};
  std::vector<std::byte> params{};
};

std::byte* allocate_aligned(uint64_t num_bytes) {
  return static_cast<std::byte*>(
      ::operator new(std::max<uint64_t>(num_bytes, 1), std::align_val_t{kAlignment}, std::nothrow));
}
void free_aligned(std::byte* memory) { ::operator delete(memory, std::align_val_t{kAlignment}); }

class SimRuntime final : public DeviceRuntime {
 public:
  SimRuntime(const SimulatedDevice& device, const sim::Module& module,
             std::unique_ptr<sim::Block> block)
      : module_(module),
        block_(std::move(block)),
        random_(device.seed),
        has_foreign_memory_(device.has_foreign_memory) {
    const bool is_cuda = device.vendor == SimulatedVendor::kCuda;
    facts_.backend = is_cuda ? "sim-cuda" : "sim-hip";
    facts_.name = is_cuda ? "simulated CUDA device" : "simulated HIP device";
    facts_.architecture = "simulated";
    facts_.wave_width = is_cuda ? 32 : 64;
    facts_.memory_bytes = device.memory_bytes;
    facts_.has_warpgroups = device.has_warpgroups;
  }
  ~SimRuntime() override {
    for (const auto& [memory, size] : allocations_) free_aligned(memory);
    for (std::byte* memory : staging_) free_aligned(memory);
  }

  const DeviceFacts& facts() const override { return facts_; }
  Result<uint64_t> free_bytes() override { return facts_.memory_bytes - used_bytes_; }

  Result<std::byte*> allocate(uint64_t num_bytes) override {
    std::byte* memory =
        num_bytes > facts_.memory_bytes - used_bytes_ ? nullptr : allocate_aligned(num_bytes);
    if (memory == nullptr) {
      return Error{ErrorCode::kOutOfMemory,
                   facts_.name + " cannot give " + std::to_string(num_bytes) + " bytes; " +
                       std::to_string(facts_.memory_bytes - used_bytes_) + " are free"};
    }
    std::memset(memory, kFreshByte, num_bytes);
    used_bytes_ += num_bytes;
    allocations_[memory] = num_bytes;
    return memory;
  }
  void release(std::byte* memory) override {
    const auto found = allocations_.find(memory);
    if (found == allocations_.end()) return;
    used_bytes_ -= found->second;
    allocations_.erase(found);
    free_aligned(memory);
  }
  Result<std::byte*> allocate_staging(uint64_t num_bytes) override {
    std::byte* memory = allocate_aligned(num_bytes);
    if (memory == nullptr)
      return Error{ErrorCode::kOutOfMemory,
                   "no " + std::to_string(num_bytes) + " bytes for staging"};
    staging_.insert(memory);
    return memory;
  }
  void release_staging(std::byte* memory) override {
    if (staging_.erase(memory) != 0) free_aligned(memory);
  }

  Status copy_in(std::byte* device, const std::byte* host, uint64_t num_bytes) override {
    DFLASH_TRY(check_range(device, num_bytes, "copy_in"));
    return queue(Operation{.kind = Operation::Kind::kCopy,
                           .destination = device,
                           .source = host,
                           .num_bytes = num_bytes});
  }
  Status copy_out(std::byte* host, const std::byte* device, uint64_t num_bytes) override {
    DFLASH_TRY(check_range(device, num_bytes, "copy_out"));
    return queue(Operation{.kind = Operation::Kind::kCopy,
                           .destination = host,
                           .source = device,
                           .num_bytes = num_bytes});
  }
  Status fill(std::byte* device, uint8_t value, uint64_t num_bytes) override {
    DFLASH_TRY(check_range(device, num_bytes, "fill"));
    return queue(Operation{.kind = Operation::Kind::kFill,
                           .destination = device,
                           .num_bytes = num_bytes,
                           .value = value});
  }
  Status launch(const KernelLaunch& launch) override {
    const bool is_sound =
        static_cast<uint16_t>(launch.kernel) < module_.entries.size() && launch.threads != 0 &&
        launch.threads % 64 == 0 && launch.threads <= sim::kMaxThreads &&
        launch.grid_y <= kMaxGridY &&
        launch.params_bytes == entry_of(module_.entries, launch.kernel).params_bytes;
    if (!is_sound)
      return fail({ErrorCode::kWorkerFailed, facts_.name + ": a launch of wrong shape"});
    Operation operation{.kind = Operation::Kind::kLaunch, .launch = launch};
    const auto* bytes = static_cast<const std::byte*>(launch.params);
    operation.params.assign(bytes, bytes + launch.params_bytes);
    return queue(std::move(operation));
  }

  Status mark(Mark mark) override {
    return queue(Operation{.kind = Operation::Kind::kMark, .value = static_cast<uint8_t>(mark)});
  }
  // The simulator's own time, as meaningful as any other of its speed.
  Result<int64_t> elapsed_ns() override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(marks_[1] - marks_[0]).count();
  }

  // Simulated threads use the machine's memory as it is.
  Result<std::byte*> map_host(std::byte* memory, uint64_t, bool) override { return memory; }
  void unmap_host(std::byte*) override {}
  void borrow_queue(uint64_t) override {}
  void return_queue() override {}

  Result<bool> wait(std::chrono::nanoseconds at_most) override {
    DFLASH_TRY(healthy());
    const auto deadline = std::chrono::steady_clock::now() + at_most;
    const CanonicalFloatMode mode;
    while (!queue_.empty()) {
      auto is_done = advance(queue_.front());
      if (!is_done.ok()) return fail(std::move(is_done).error());
      if (is_done.value()) queue_.pop_front();
      if (!queue_.empty() && std::chrono::steady_clock::now() >= deadline) return false;
    }
    return true;
  }

 private:
  Status healthy() const { return is_lost_ ? Status(Error{error_.code, error_.message}) : ok(); }
  Error fail(Error error) {
    is_lost_ = true;
    error_ = {error.code, error.message};
    queue_.clear();
    return error;
  }
  Status queue(Operation operation) {
    DFLASH_TRY(healthy());
    queue_.push_back(std::move(operation));
    return ok();
  }
  // A copy must stay inside one allocation.
  Status check_range(const std::byte* device, uint64_t num_bytes, const char* what) {
    if (has_foreign_memory_) return ok();
    const auto next = allocations_.upper_bound(const_cast<std::byte*>(device));
    if (next != allocations_.begin()) {
      const auto& [memory, size] = *std::prev(next);
      const auto offset = static_cast<uint64_t>(device - memory);
      if (offset <= size && num_bytes <= size - offset) return ok();
    }
    return fail({ErrorCode::kWorkerFailed, facts_.name + ": " + what + " of " +
                                               std::to_string(num_bytes) +
                                               " bytes outside of any allocation"});
  }

  Result<bool> advance(Operation& operation) {
    switch (operation.kind) {
      case Operation::Kind::kCopy:
        std::memcpy(operation.destination, operation.source, operation.num_bytes);
        return true;
      case Operation::Kind::kFill:
        std::memset(operation.destination, operation.value, operation.num_bytes);
        return true;
      case Operation::Kind::kLaunch: return advance_launch(operation);
      case Operation::Kind::kMark:
        marks_[operation.value] = std::chrono::steady_clock::now();
        return true;
    }
    return true;
  }

  // One turn of the current block; blocks run one after the other, in shuffled order.
  Result<bool> advance_launch(const Operation& operation) {
    const KernelLaunch& launch = operation.launch;
    if (!is_launched_) {
      blocks_.resize(size_t{launch.grid_x} * launch.grid_y);
      std::iota(blocks_.begin(), blocks_.end(), 0);
      std::shuffle(blocks_.begin(), blocks_.end(), random_);
      is_launched_ = true;
      is_started_ = false;
    }
    if (blocks_.empty()) {
      is_launched_ = false;
      return true;
    }
    if (!is_started_) {
      const uint64_t index = blocks_.back();
      const KernelEntry& entry = entry_of(module_.entries, launch.kernel);
      block_->start(
          {module_.functions[static_cast<uint16_t>(launch.kernel)], operation.params.data(),
           entry.name, launch.threads, static_cast<uint32_t>(index % launch.grid_x),
           static_cast<uint32_t>(index / launch.grid_x), launch.grid_x, entry.dynamic_bytes});
      is_started_ = true;
    }
    auto has_left = block_->advance();
    if (!has_left.ok()) return std::move(has_left).error().with(facts_.name);
    if (has_left.value()) {
      blocks_.pop_back();
      is_started_ = false;
    }
    return false;
  }

  const sim::Module module_;
  DeviceFacts facts_;
  std::unique_ptr<sim::Block> block_;
  std::mt19937_64 random_;
  const bool has_foreign_memory_;
  uint64_t used_bytes_ = 0;
  std::map<std::byte*, uint64_t> allocations_;
  std::set<std::byte*> staging_;
  std::deque<Operation> queue_;
  std::chrono::steady_clock::time_point marks_[2];  // by Mark
  std::vector<uint64_t> blocks_;  // of the launch in progress, those yet to finish
  bool is_launched_ = false;
  bool is_started_ = false;
  bool is_lost_ = false;
  Error error_{};
};

}  // namespace

Result<std::unique_ptr<DeviceRuntime>> make_simulated_runtime(const SimulatedDevice& device,
                                                              const sim::Module& module) {
  auto block = sim::Block::create(device.vendor == SimulatedVendor::kCuda ? 32 : 64, device.seed);
  if (!block.ok()) return std::move(block).error();
  return std::unique_ptr<DeviceRuntime>(
      std::make_unique<SimRuntime>(device, module, std::move(block).value()));
}

}  // namespace dflash::compute::gpu
