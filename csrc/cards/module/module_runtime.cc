// SPDX-License-Identifier: Apache-2.0
#include "cards/module/module_runtime.h"

#include <sched.h>
#include <time.h>

#include <thread>
#include <utility>

#include "base/clock.h"

namespace dflash::compute::gpu {
namespace {

// for a queue that does not end, when the runtime is destroyed
constexpr int64_t kGiveUpNs = 1'000'000'000;
// queries without a pause, then with the processor offered to others,
constexpr int64_t kSpinNs = 30'000;
// for a decode step is shorter than the 50 us that the kernel adds to each nap
constexpr int64_t kYieldNs = 1'000'000;
constexpr int64_t kNapNs = 20'000;

class ModuleRuntime final : public DeviceRuntime {
 public:
  ModuleRuntime(std::unique_ptr<DriverApi> driver, DeviceFacts facts, KernelTable kernels)
      : driver_(std::move(driver)), facts_(std::move(facts)), kernels_(kernels) {}
  ~ModuleRuntime() override;
  Status start();

  const DeviceFacts& facts() const override { return facts_; }
  Result<uint64_t> free_bytes() override;
  Result<std::byte*> allocate(uint64_t num_bytes) override;
  void release(std::byte* memory) override;
  Result<std::byte*> allocate_staging(uint64_t num_bytes) override;
  void release_staging(std::byte* memory) override;
  Status copy_in(std::byte* device, const std::byte* host, uint64_t num_bytes) override;
  Status copy_out(std::byte* host, const std::byte* device, uint64_t num_bytes) override;
  Status fill(std::byte* device, uint8_t value, uint64_t num_bytes) override;
  Status launch(const KernelLaunch& launch) override;
  Status mark(Mark mark) override;
  Result<int64_t> elapsed_ns() override;
  Result<bool> wait(std::chrono::nanoseconds at_most) override;
  Result<std::byte*> map_host(std::byte* memory, uint64_t num_bytes, bool is_read_only) override;
  void unmap_host(std::byte* memory) override;
  void borrow_queue(uint64_t stream) override { queue_ = reinterpret_cast<void*>(stream); }
  void return_queue() override { queue_ = own_queue_; }
  void leave() override;
  uint64_t stream() const override { return reinterpret_cast<uintptr_t>(own_queue_); }

 private:
  Status enter();
  Status done(int status, const char* what);
  Error allocation_error(int status, uint64_t num_bytes, const char* where);
  Status load_kernels();

  std::unique_ptr<DriverApi> driver_;
  DeviceFacts facts_;
  const KernelTable kernels_;
  bool is_in_use_ = false;       // use() succeeded: drop() is due
  void* own_ = nullptr;          // what is current while the device is
  std::thread::id current_for_;  // the thread that used the device last and has not left it
  void* before_ = nullptr;       // what was current for that thread
  bool has_before_ = false;
  std::string lost_;  // not empty: the device failed, and with which words
  void* own_queue_ = nullptr;
  void* queue_ = nullptr;  // what is used: the own one, or one that is borrowed
  void* events_[2] = {};   // by Mark
  void* module_ = nullptr;
  std::vector<void*> functions_;  // [kernels_]
};

// After a failure or with work that does not end, the driver's functions may hang: everything is
// left to the end of the process.
ModuleRuntime::~ModuleRuntime() {
  if (!is_in_use_) return;
  return_queue();
  if (queue_ != nullptr) {
    const auto ended = wait(std::chrono::nanoseconds(kGiveUpNs));
    if (!ended.ok() || !ended.value()) return;
    driver_->destroy_queue(queue_);
  }
  for (void* event : events_) {
    if (event != nullptr) driver_->destroy_event(event);
  }
  if (module_ != nullptr) driver_->unload_module(module_);
  leave();  // a dropped context must not stay current
  driver_->drop(facts_.index);
}

Status ModuleRuntime::done(int status, const char* what) {
  if (status == 0) return ok();
  lost_ = std::string(what) + " failed: " + driver_->text(status);
  return Error{ErrorCode::kWorkerFailed, lost_};
}

// A device is current per thread, and another user of the thread (a framework, the runtime of a
// second card) may have changed it since; a lost one stays lost.
Status ModuleRuntime::enter() {
  if (!lost_.empty()) return Error{ErrorCode::kWorkerFailed, lost_};
  void* found = nullptr;
  const bool is_known = driver_->current(&found) == 0;
  if (current_for_ != std::this_thread::get_id()) {
    before_ = found;
    has_before_ = is_known;
    current_for_ = std::this_thread::get_id();
  }
  if (is_in_use_ && is_known && found == own_) return ok();
  DFLASH_TRY(done(driver_->use(facts_.index), "making the device current"));
  is_in_use_ = true;
  return done(driver_->current(&own_), "asking for the current device");
}

void ModuleRuntime::leave() {
  if (current_for_ != std::this_thread::get_id()) return;
  current_for_ = std::thread::id();
  // where that fails, the next use of the framework says so
  if (has_before_) driver_->restore(before_);
}

Status ModuleRuntime::start() {
  DFLASH_TRY(enter());
  DFLASH_TRY(load_kernels());
  for (void*& event : events_) DFLASH_TRY(done(driver_->create_event(&event), "creating an event"));
  DFLASH_TRY(done(driver_->create_queue(&own_queue_), "creating a queue"));
  return_queue();
  return ok();
}

Status ModuleRuntime::load_kernels() {
  int status = 0;
  const std::vector<const void*> images = driver_->images(facts_);
  for (const void* image : images) {
    status = driver_->load_module(&module_, image);
    if (status == 0) break;
  }
  if (module_ == nullptr || status != 0) {
    module_ = nullptr;
    return Error{ErrorCode::kUnsupported,
                 "no kernels of this build run on " + facts_.architecture +
                     (images.empty() ? std::string() : ": " + driver_->text(status))};
  }
  for (const KernelEntry& kernel : kernels_) {
    if (driver_->find_function(&functions_.emplace_back(nullptr), module_, kernel.name) != 0) {
      return Error{ErrorCode::kUnsupported, std::string("the plug-in's image has no kernel ") +
                                                kernel.name + "; build it again"};
    }
  }
  return ok();
}

Result<uint64_t> ModuleRuntime::free_bytes() {
  DFLASH_TRY(enter());
  size_t free_bytes = 0, all_bytes = 0;
  DFLASH_TRY(done(driver_->memory(&free_bytes, &all_bytes), "asking for free memory"));
  return uint64_t{free_bytes};
}

Error ModuleRuntime::allocation_error(int status, uint64_t num_bytes, const char* where) {
  if (status != kDriverOutOfMemory) return done(status, "allocating memory").error();
  size_t free_bytes = 0, all_bytes = 0;
  driver_->memory(&free_bytes, &all_bytes);
  return Error{ErrorCode::kOutOfMemory,
               std::to_string(num_bytes) + " bytes of memory " + where +
                   " could not be allocated; " + std::to_string(free_bytes) + " of " +
                   std::to_string(all_bytes) + " bytes of the device are free"};
}

Result<std::byte*> ModuleRuntime::allocate(uint64_t num_bytes) {
  DFLASH_TRY(enter());
  void* memory = nullptr;
  if (const int status = driver_->allocate(&memory, num_bytes); status != 0)
    return allocation_error(status, num_bytes, "on the device");
  return static_cast<std::byte*>(memory);
}

void ModuleRuntime::release(std::byte* memory) {
  if (memory != nullptr && enter().ok()) driver_->release(memory);
}

Result<std::byte*> ModuleRuntime::allocate_staging(uint64_t num_bytes) {
  DFLASH_TRY(enter());
  void* memory = nullptr;
  if (const int status = driver_->allocate_host(&memory, num_bytes); status != 0) {
    return allocation_error(status, num_bytes, "pinned at the host");
  }
  return static_cast<std::byte*>(memory);
}

void ModuleRuntime::release_staging(std::byte* memory) {
  if (memory != nullptr && enter().ok()) driver_->release_host(memory);
}

// A refusal is about this memory and not about the device, which goes on.
Result<std::byte*> ModuleRuntime::map_host(std::byte* memory, uint64_t num_bytes,
                                           bool is_read_only) {
  DFLASH_TRY(enter());
  int status = driver_->map_host(memory, num_bytes, is_read_only);
  void* device = nullptr;
  if (status == 0) {
    status = driver_->device_address(&device, memory);
    if (status == 0) return static_cast<std::byte*>(device);
    driver_->unmap_host(memory);
  }
  return Error{ErrorCode::kUnsupported,
               "registering " + std::to_string(num_bytes) + " bytes of the host's memory" +
                   (is_read_only ? " to be read" : "") + " failed: " + driver_->text(status)};
}

void ModuleRuntime::unmap_host(std::byte* memory) {
  if (enter().ok()) driver_->unmap_host(memory);
}

Status ModuleRuntime::copy_in(std::byte* device, const std::byte* host, uint64_t num_bytes) {
  if (num_bytes == 0) return ok();
  DFLASH_TRY(enter());
  return done(driver_->copy_in(device, host, num_bytes, queue_), "copying to the device");
}

Status ModuleRuntime::copy_out(std::byte* host, const std::byte* device, uint64_t num_bytes) {
  if (num_bytes == 0) return ok();
  DFLASH_TRY(enter());
  return done(driver_->copy_out(host, device, num_bytes, queue_), "copying from the device");
}

Status ModuleRuntime::fill(std::byte* device, uint8_t value, uint64_t num_bytes) {
  if (num_bytes == 0) return ok();
  DFLASH_TRY(enter());
  return done(driver_->fill(device, value, num_bytes, queue_), "filling memory of the device");
}

Status ModuleRuntime::launch(const KernelLaunch& launch) {
  if (launch.grid_x == 0 || launch.grid_y == 0) return ok();
  DFLASH_TRY(enter());
  // read only, whatever the driver's signature says
  void* arguments[] = {const_cast<void*>(launch.params)};
  void* function = functions_[static_cast<uint16_t>(launch.kernel)];
  const auto& [name, params_bytes, dynamic_bytes] = entry_of(kernels_, launch.kernel);
  if (dynamic_bytes != 0)
    DFLASH_TRY(done(driver_->allow_dynamic(function, dynamic_bytes), "asking for shared memory"));
  return done(driver_->launch(function, launch.grid_x, launch.grid_y, launch.threads, dynamic_bytes,
                              queue_, arguments),
              name);
}

Status ModuleRuntime::mark(Mark mark) {
  DFLASH_TRY(enter());
  return done(driver_->record_event(events_[static_cast<uint8_t>(mark)], queue_),
              "recording an event");
}

Result<int64_t> ModuleRuntime::elapsed_ns() {
  DFLASH_TRY(enter());
  float milliseconds = 0.0f;
  const int status = driver_->elapsed(&milliseconds, events_[0], events_[1]);
  if (status != 0) return std::move(done(status, "reading the time between two events")).error();
  return static_cast<int64_t>(double{milliseconds} * 1e6);
}

Result<bool> ModuleRuntime::wait(std::chrono::nanoseconds at_most) {
  DFLASH_TRY(enter());
  const Deadline deadline = Deadline::after_ns(at_most.count());
  const Deadline spinning = Deadline::after_ns(kSpinNs), yielding = Deadline::after_ns(kYieldNs);
  for (;;) {
    const int status = driver_->query(queue_);
    if (status == 0) return true;
    if (status != kDriverNotReady) return std::move(done(status, "a kernel or copy")).error();
    if (deadline.has_passed()) return false;
    if (!spinning.has_passed()) continue;
    if (!yielding.has_passed()) {
      ::sched_yield();
      continue;
    }
    const timespec nap{0, kNapNs};
    ::nanosleep(&nap, nullptr);
  }
}

}  // namespace

Result<std::unique_ptr<DeviceRuntime>> make_module_runtime(std::unique_ptr<DriverApi> driver,
                                                           uint32_t device, KernelTable kernels) {
  auto devices = driver->list();
  if (!devices.ok()) return std::move(devices).error();
  if (device >= devices.value().size()) {
    return Error{ErrorCode::kInvalidArgument, "device " + std::to_string(device) +
                                                  " does not exist; the driver lists " +
                                                  std::to_string(devices.value().size())};
  }
  const DriverDevice& found = devices.value()[device];
  if (!found.reason.empty()) return Error{ErrorCode::kUnsupported, found.reason};
  auto runtime = std::make_unique<ModuleRuntime>(std::move(driver), found.facts, kernels);
  DFLASH_TRY(runtime->start());
  return std::unique_ptr<DeviceRuntime>(std::move(runtime));
}

}  // namespace dflash::compute::gpu
