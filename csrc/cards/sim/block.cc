// Scheduling of one simulated block, its collectives and its detectors.
// SPDX-License-Identifier: Apache-2.0
#include "cards/sim/block.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

#include "base/clock.h"

namespace dflash::compute::gpu::sim {
namespace {

constexpr size_t kStackBytes = 128 * 1024;  // kernels need a few KiB; sanitizers several times that
// the largest pattern of an instruction that reads shared memory (128-byte swizzle)
constexpr size_t kSharedAlignment = 1024;
// of dynamic shared memory: kernels must align it themselves
constexpr size_t kDynamicOffset = 16;

// The thread that runs on this OS thread, the simulated special registers: set around every
// resume().
thread_local void* running = nullptr;

// Not inlined: a fibre may go on on another OS thread, where the address of `running` is another.
[[gnu::noinline]] void* running_thread() { return running; }

bool same(Site a, Site b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

std::string text_of(Site site) {
  const char* slash = std::strrchr(site.file, '/');
  return std::string(slash == nullptr ? site.file : slash + 1) + ":" + std::to_string(site.line);
}

}  // namespace

Result<std::unique_ptr<Block>> Block::create(uint32_t wave_width, uint64_t seed) {
  std::unique_ptr<Block> block(new Block(wave_width, seed));
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  block->stack_step_ = kStackBytes + page;
  void* memory = mmap(nullptr, block->stack_step_ * kMaxThreads, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    return Error{ErrorCode::kOutOfMemory, "no address space for the stacks of a simulated block"};
  block->stacks_ = static_cast<std::byte*>(memory);
  for (uint32_t i = 0; i < kMaxThreads; ++i)
    mprotect(block->stacks_ + i * block->stack_step_, page, PROT_NONE);
  block->shared_.resize(kMostSharedBytes + kSharedAlignment);
  return block;
}

Block::~Block() {
  if (stacks_ != nullptr) munmap(stacks_, stack_step_ * kMaxThreads);
}

void Block::start(const Launch& launch) {
  launch_ = launch;
  if (threads_.size() < launch.threads) threads_ = std::vector<Thread>(launch.threads);
  order_.resize(launch.threads);
  for (uint32_t i = 0; i < launch.threads; ++i) {
    Thread& thread = threads_[i];
    thread.block = this;
    thread.index = i;
    thread.state = State::kReady;
    thread.async.clear();
    thread.fibre.prepare(stacks_ + (i + 1) * stack_step_ - kStackBytes, kStackBytes,
                         &Block::run_thread, &thread);
    order_[i] = i;
  }
  subgroups_.resize(launch.threads / kSubgroup);
  std::iota(subgroups_.begin(), subgroups_.end(), 0);
  std::shuffle(subgroups_.begin(), subgroups_.end(), random_);
  runs_ahead_ = random_() % 2 == 0;
  shared_objects_.clear();
  shared_used_ = 0;
  if (launch.dynamic_bytes != 0) {
    shared_used_ = kDynamicOffset + (launch.dynamic_bytes + 15) / 16 * 16;
    std::memset(reinterpret_cast<void*>(shared_base() + kDynamicOffset), 0xff,
                launch.dynamic_bytes);
  }
  async_.start();
  num_left_ = 0;
  failure_.clear();
}

void Block::run_thread(void* argument) {
  auto* thread = static_cast<Thread*>(argument);
  thread->block->launch_.kernel(thread->block->launch_.params);
  thread->state = State::kLeft;
  ++thread->block->num_left_;
  thread->fibre.yield_last();
}

Result<bool> Block::advance() {
  auto has_run = runs_ahead_ ? run_first_subgroup() : run_all(order_);
  if (!has_run.ok()) return has_run;
  if (num_left_ == launch_.threads) return true;
  if (has_run.value()) return false;
  bool is_released = false;
  for (uint32_t first = 0; first < launch_.threads; first += kSubgroup)
    is_released |= release_subgroup(first);
  if (is_released || release_block()) return false;
  return divergence();
}

// Those of `order` that can go on, each once, shuffled. Whether there were any.
Result<bool> Block::run_all(std::span<uint32_t> order) {
  std::shuffle(order.begin(), order.end(), random_);
  bool has_run = false;
  for (uint32_t index : order) {
    Thread& thread = threads_[index];
    if (thread.state != State::kReady) continue;
    has_run = true;
    running = &thread;
    thread.fibre.resume();
    running = nullptr;
    if (!failure_.empty()) return Error{ErrorCode::kWorkerFailed, failure_};
  }
  return has_run;
}

// The foremost sub-group that can go on, through its collectives too, while the others stand still.
// One that polls goes to the end.
Result<bool> Block::run_first_subgroup() {
  for (size_t i = 0; i < subgroups_.size(); ++i) {
    const uint32_t first = subgroups_[i] * kSubgroup;
    has_paused_ = false;
    std::iota(order_.begin(), order_.begin() + kSubgroup, first);
    auto has_run = run_all({order_.data(), kSubgroup});
    if (!has_run.ok()) return has_run;
    const auto own = subgroups_.begin() + static_cast<ptrdiff_t>(i);
    if (has_paused_) std::rotate(own, own + 1, subgroups_.end());
    if (has_run.value() || release_subgroup(first)) return true;
  }
  return false;
}

bool Block::release_subgroup(uint32_t first) {
  const Thread& one = threads_[first];
  for (uint32_t i = first; i < first + kSubgroup; ++i) {
    const Thread& other = threads_[i];
    if (other.state != State::kAtCollective || other.kind != one.kind ||
        !same(other.site, one.site))
      return false;
  }
  uint64_t values[kSubgroup], ballot = 0;
  for (uint32_t lane = 0; lane < kSubgroup; ++lane) {
    values[lane] = threads_[first + lane].value;
    ballot |= uint64_t{values[lane] != 0} << lane;
  }
  for (uint32_t lane = 0; lane < kSubgroup; ++lane) {
    Thread& thread = threads_[first + lane];
    if (thread.kind == Collective::kShuffle) thread.value = values[thread.argument % kSubgroup];
    if (thread.kind == Collective::kBallot) thread.value = ballot;
    thread.state = State::kReady;
  }
  return true;
}

bool Block::release_block() {
  const Thread& one = threads_[0];
  for (uint32_t i = 0; i < launch_.threads; ++i) {
    if (threads_[i].state != State::kAtBlockBarrier || !same(threads_[i].site, one.site))
      return false;
  }
  for (uint32_t i = 0; i < launch_.threads; ++i) threads_[i].state = State::kReady;
  return true;
}

std::string Block::place(const Thread& thread) const {
  return std::string("kernel ") + launch_.name + ", block (" + std::to_string(launch_.block_x) +
         ", " + std::to_string(launch_.block_y) + "), thread " + std::to_string(thread.index);
}

std::string Block::where(const Thread& thread) const {
  const std::string who = "thread " + std::to_string(thread.index);
  if (thread.state == State::kLeft) return who + " has left";
  return who + " waits at " + text_of(thread.site) +
         (thread.state == State::kAtBlockBarrier ? " for the block" : " for its sub-group");
}

// Called when nothing can go on: some thread waits for another that left or waits elsewhere.
Error Block::divergence() const {
  for (uint32_t i = 0; i < launch_.threads; ++i) {
    const Thread& one = threads_[i];
    if (one.state == State::kLeft) continue;
    const bool is_block = one.state == State::kAtBlockBarrier;
    const uint32_t begin = is_block ? 0 : i / kSubgroup * kSubgroup,
                   end = is_block ? launch_.threads : begin + kSubgroup;
    for (uint32_t j = begin; j < end; ++j) {
      const Thread& other = threads_[j];
      if (other.state == one.state && same(other.site, one.site)) continue;
      return Error{ErrorCode::kWorkerFailed,
                   place(one) + ": divergent barrier: " + where(one) + ", but " + where(other)};
    }
  }
  return Error{
      ErrorCode::kWorkerFailed,
      place(threads_[0]) + ": divergent barrier: lanes ask for unlike operations at one line"};
}

void Block::note_failure(const Thread& thread, const std::string& what, Site site) {
  failure_ = place(thread) + ": " + what + " at " + text_of(site);
}

// The caller's frame is abandoned: nothing in it may own memory.
void Block::leave_failed(Thread& thread) {
  thread.fibre.yield_last();
  __builtin_unreachable();  // advance() never resumes a block that failed
}

uintptr_t Block::shared_base() const {
  return (reinterpret_cast<uintptr_t>(shared_.data()) + kSharedAlignment - 1) / kSharedAlignment *
         kSharedAlignment;
}

void* Block::find_shared(size_t num_bytes, Site site) {
  const uintptr_t base = shared_base();
  for (const SharedObject& object : shared_objects_) {
    if (same(object.site, site)) return reinterpret_cast<void*>(base + object.offset);
  }
  const size_t offset = shared_used_;
  shared_used_ = (offset + num_bytes + 15) / 16 * 16;
  if (shared_used_ > (launch_.dynamic_bytes == 0 ? kSharedBytes : kMostSharedBytes)) return nullptr;
  shared_objects_.push_back({site, offset, num_bytes});
  auto* memory = reinterpret_cast<void*>(base + offset);
  std::memset(memory, 0xff, num_bytes);
  return memory;
}

ThreadPlace thread_place() {
  const auto& thread = *static_cast<Block::Thread*>(running_thread());
  const Block::Launch& launch = thread.block->launch_;
  return {thread.index,   launch.threads, launch.block_x,
          launch.block_y, launch.grid_x,  thread.block->wave_width_};
}

void block_barrier(Site site) {
  auto& thread = *static_cast<Block::Thread*>(running_thread());
  thread.site = site;
  thread.state = Block::State::kAtBlockBarrier;
  thread.fibre.yield();
}

uint64_t subgroup_collective(Collective kind, uint64_t value, uint32_t argument, Site site) {
  auto& thread = *static_cast<Block::Thread*>(running_thread());
  thread.site = site;
  thread.kind = kind;
  thread.value = value;
  thread.argument = argument;
  thread.state = Block::State::kAtCollective;
  thread.fibre.yield();
  return thread.value;
}

void* shared_object(size_t num_bytes, Site site) {
  auto& thread = *static_cast<Block::Thread*>(running_thread());
  void* memory = thread.block->find_shared(num_bytes, site);
  if (memory == nullptr) {
    thread.block->note_failure(
        thread, "more than " + std::to_string(kSharedBytes) + " bytes of shared memory", site);
    thread.block->leave_failed(thread);
  }
  return memory;
}

void pause_thread() {
  auto& thread = *static_cast<Block::Thread*>(running_thread());
  thread.block->has_paused_ = true;
  thread.fibre.yield();
}
uint64_t clock_ns() { return static_cast<uint64_t>(now_ns()); }

void out_of_bounds(uint64_t index, uint64_t size, Site site) {
  auto& thread = *static_cast<Block::Thread*>(running_thread());
  thread.block->note_failure(thread,
                             "index " + std::to_string(index) + " of " + std::to_string(size) +
                                 " elements of shared memory",
                             site);
  thread.block->leave_failed(thread);
}

void fail_thread(const char* what, uint64_t value, Site site) {
  auto& thread = *static_cast<Block::Thread*>(running_thread());
  thread.block->note_failure(thread, std::string(what) + " " + std::to_string(value), site);
  thread.block->leave_failed(thread);
}

void* dynamic_shared(Site site) {
  const Block& block = *static_cast<Block::Thread*>(running_thread())->block;
  if (block.launch_.dynamic_bytes == 0)
    fail_thread("dynamic shared memory that the launch did not ask for, bytes", 0, site);
  return reinterpret_cast<void*>(block.shared_base() + kDynamicOffset);
}

uint32_t shared_address(const void* at, Site site) {
  const Block& block = *static_cast<Block::Thread*>(running_thread())->block;
  const uintptr_t offset = reinterpret_cast<uintptr_t>(at) - block.shared_base();
  if (offset >= block.shared_used_)
    fail_thread("an address outside of shared memory by", offset - block.shared_used_, site);
  return static_cast<uint32_t>(offset);
}

void* shared_at(uint32_t address, size_t num_bytes, Site site) {
  const Block& block = *static_cast<Block::Thread*>(running_thread())->block;
  if (address + num_bytes > block.shared_used_)
    fail_thread("shared memory ends before address", address + num_bytes, site);
  return reinterpret_cast<void*>(block.shared_base() + address);
}

AsyncWork& own_async_work() { return static_cast<Block::Thread*>(running_thread())->async; }
AsyncShared& block_async_work() {
  return static_cast<Block::Thread*>(running_thread())->block->async_;
}

}  // namespace dflash::compute::gpu::sim
