// One block of simulated threads: a fibre each, run one at a time so that a missing barrier shows.
// In half of the blocks all threads advance together, in an order that the seed shuffles at every
// turn; in the others one sub-group runs as far ahead as it can. Finds divergent barriers: a thread
// that leaves, or waits somewhere else, while others wait for it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/fibre.h"
#include "base/result.h"
#include "cards/sim/async_work.h"
#include "cards/sim/thread_view.h"

namespace dflash::compute::gpu::sim {

using Kernel = void (*)(const void* params);

inline constexpr uint32_t kSubgroup = 32;
inline constexpr uint32_t kMaxThreads = 1024;
// what every vendor gives a block without asking
inline constexpr size_t kSharedBytes = 48 * 1024;
inline constexpr size_t kMostSharedBytes = 227 * 1024;  // with what the launch asks for, as sm_90

class Block {
 public:
  // Errors: kOutOfMemory (stacks).
  static Result<std::unique_ptr<Block>> create(uint32_t wave_width, uint64_t seed);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  struct Launch {
    Kernel kernel;
    const void* params;
    const char* name;
    uint32_t threads;  // a multiple of 64, <= kMaxThreads
    uint32_t block_x, block_y, grid_x;
    uint32_t dynamic_bytes = 0;
  };
  // Readies the block; `launch.params` stays until it is done.
  void start(const Launch& launch);
  // Lets every thread that can go on do so once. True when all have left. Errors: kWorkerFailed
  // naming kernel, block, thread and line.
  Result<bool> advance();

 private:
  enum class State : uint8_t { kReady, kAtBlockBarrier, kAtCollective, kLeft };
  struct Thread {
    Fibre fibre;
    Block* block = nullptr;
    uint32_t index = 0;
    State state = State::kReady;
    Site site;
    Collective kind{};
    uint64_t value = 0;  // given to a collective, then its result
    uint32_t argument = 0;
    AsyncWork async;
  };
  struct SharedObject {
    Site site;
    size_t offset;
    size_t num_bytes;
  };

  friend ThreadPlace thread_place();
  friend void block_barrier(Site site);
  friend uint64_t subgroup_collective(Collective kind, uint64_t value, uint32_t argument,
                                      Site site);
  friend void* shared_object(size_t num_bytes, Site site);
  friend void pause_thread();
  friend void out_of_bounds(uint64_t index, uint64_t size, Site site);
  friend void fail_thread(const char* what, uint64_t value, Site site);
  friend void* dynamic_shared(Site site);
  friend uint32_t shared_address(const void* at, Site site);
  friend void* shared_at(uint32_t address, size_t num_bytes, Site site);
  friend AsyncWork& own_async_work();
  friend AsyncShared& block_async_work();

  Block(uint32_t wave_width, uint64_t seed) : wave_width_(wave_width), random_(seed) {}
  static void run_thread(void* thread);
  Result<bool> run_all(std::span<uint32_t> order);
  Result<bool> run_first_subgroup();
  uintptr_t shared_base() const;
  void* find_shared(size_t num_bytes, Site site);
  void note_failure(const Thread& thread, const std::string& what, Site site);
  [[noreturn]] void leave_failed(Thread& thread);
  bool release_subgroup(uint32_t first);
  bool release_block();
  Error divergence() const;
  std::string where(const Thread& thread) const;
  std::string place(const Thread& thread) const;

  const uint32_t wave_width_;
  std::mt19937_64 random_;
  std::byte* stacks_ = nullptr;  // kMaxThreads stacks, each below a page that faults
  size_t stack_step_ = 0;
  Launch launch_{};
  std::vector<Thread> threads_;
  std::vector<uint32_t> order_;
  std::vector<uint32_t> subgroups_;  // the foremost runs first
  bool runs_ahead_ = false;
  bool has_paused_ = false;  // a thread polled since this was last cleared
  std::vector<std::byte> shared_;
  std::vector<SharedObject> shared_objects_;
  size_t shared_used_ = 0;
  AsyncShared async_;
  uint32_t num_left_ = 0;
  std::string failure_;  // empty: none
};

}  // namespace dflash::compute::gpu::sim
