// The pool's protocol of sleep and wake, which is the same on both sides. One side announces that
// it will sleep, looks again and sleeps; the other changes the state and then looks for sleepers.
// Sequential consistency of those four steps excludes that a wake-up is lost.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <system_error>

#include "base/clock.h"
#include "base/float_mode.h"
#include "base/operator_clock.h"

namespace dflash::compute {
namespace {

constexpr uint32_t kTaskBits = 24;
// This is also the most tasks that one piece can count.
constexpr uint64_t kTaskMask = (uint64_t{1} << kTaskBits) - 1;
constexpr uint32_t kMaxThreads = 1024;
// Sleepers look again this often, so that no wait is unbounded.
constexpr std::chrono::milliseconds kSleepBound{500};

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Bytes that a thread asks for between two looks whether there is work. At 20 GB/s they take a
// tenth of a microsecond, by which a job begins later at most.
constexpr size_t kFetchBytes = 2048;
constexpr size_t kCacheLine = 64;
// The most that a thread fetches for one job. It is half of the smallest second-level cache in use
// (1 MiB), so that the first bytes are still there when the job begins.
constexpr size_t kMostFetched = size_t{512} << 10;

// Spins for at most `spin_ns`; returns whether the condition came to hold.
template <class Condition>
bool spin_until(int64_t spin_ns, Condition holds) {
  if (holds()) return true;
  if (spin_ns <= 0) return false;
  const Deadline end = Deadline::after_ns(spin_ns);
  do {
    for (int i = 0; i < 32; ++i) {
      if (holds()) return true;
      pause();
    }
  } while (!end.has_passed());
  return false;
}

Status pin(std::thread& thread, int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu < 0 || cpu >= CPU_SETSIZE)
    return Error{ErrorCode::kInvalidArgument, "cpu " + std::to_string(cpu) + " does not exist"};
  CPU_SET(static_cast<size_t>(cpu), &set);
  const int failure = pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
  if (failure == 0) return ok();
  return Error{ErrorCode::kSystem, "cannot pin a compute thread to cpu " + std::to_string(cpu) +
                                       ": " + std::strerror(failure)};
}

}  // namespace

Result<std::unique_ptr<ThreadPool>> ThreadPool::create(uint32_t num_threads,
                                                       const std::vector<int>& cpus,
                                                       int64_t spin_ns) {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    return Error{ErrorCode::kInvalidArgument,
                 "threads is " + std::to_string(num_threads) + "; allowed: 1..1024"};
  }
  std::unique_ptr<ThreadPool> pool(new ThreadPool(num_threads, spin_ns));
  for (uint32_t i = 1; i < num_threads; ++i) {
    try {
      pool->threads_.emplace_back([raw = pool.get(), i] { raw->thread_main(i); });
    } catch (const std::system_error& failure) {
      return Error{ErrorCode::kSystem,
                   "cannot start compute thread " + std::to_string(i) + ": " + failure.what()};
    }
    if (i < cpus.size()) DFLASH_TRY(pin(pool->threads_.back(), cpus[i]));
  }
  return pool;
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_.store(true);
  }
  work_arrived_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool ThreadPool::has_work() const {
  const uint64_t work = work_.load();
  return (work & kTaskMask) < (work >> kTaskBits);
}

void ThreadPool::expect(const FirstReads& reads) {
  if (threads_.empty() || spin_ns_ <= 0) return;
  expected_begin_.store(reads.begin, std::memory_order_relaxed);
  expected_bytes_.store(reads.task_bytes, std::memory_order_relaxed);
  num_expected_.fetch_add(1, std::memory_order_release);
}

FirstReads ThreadPool::expected() const {
  return {expected_begin_.load(std::memory_order_relaxed),
          expected_bytes_.load(std::memory_order_relaxed)};
}

template <class Condition>
void ThreadPool::fetch_expected(uint32_t thread, uint32_t& fetched, const Condition& may_go) const {
  const uint32_t number = num_expected_.load(std::memory_order_acquire);
  if (number == fetched) return;
  fetched = number;
  const auto [begin, task_bytes] = expected();
  if (begin == nullptr) return;
  const std::byte* at = begin + thread * task_bytes;
  const std::byte* const end = at + std::min(task_bytes, kMostFetched);
  for (; at < end && !may_go(); at += kFetchBytes) {
    for (size_t line = 0; line < kFetchBytes; line += kCacheLine)
      __builtin_prefetch(at + line, 0, 2);
  }
}

bool ThreadPool::take_and_run(uint32_t thread) {
  uint64_t work = work_.load();
  do {
    if ((work & kTaskMask) >= (work >> kTaskBits)) return false;
  } while (!work_.compare_exchange_weak(work, work + 1));
  const int64_t begun_ns = is_timed_ ? now_ns() : 0;
  function_(context_, first_task_ + (work & kTaskMask), thread);
  if (begun_ns != 0) busy_ns_.fetch_add(now_ns() - begun_ns, std::memory_order_relaxed);
  if (num_pending_.fetch_sub(1) == 1 && caller_sleeps_.load()) {
    const std::lock_guard lock(mutex_);
    all_done_.notify_one();
  }
  return true;
}

void ThreadPool::await_turn() {
  std::unique_lock lock(turn_mutex_);
  const uint64_t number = next_turn_++;
  // A job's tasks wait for nothing, so that every turn ends.
  while (turn_ != number) turn_ended_.wait_for(lock, kSleepBound);
}

void ThreadPool::end_turn() {
  bool is_awaited = false;
  {
    const std::lock_guard lock(turn_mutex_);
    ++turn_;
    is_awaited = turn_ != next_turn_;
  }
  if (is_awaited) turn_ended_.notify_all();
}

void ThreadPool::run_tasks(uint64_t num_tasks, TaskFunction function, void* context) {
  await_turn();
  run_job(num_tasks, function, context);
  end_turn();
}

void ThreadPool::run_job(uint64_t num_tasks, TaskFunction function, void* context) {
  if (threads_.empty() || num_tasks <= 1) {
    for (uint64_t task = 0; task < num_tasks; ++task) function(context, task, 0);
    return;
  }
  function_ = function;
  context_ = context;
  OperatorClock* const clock = OperatorClock::running();
  is_timed_ = clock != nullptr;
  int64_t begun_ns = 0;
  if (is_timed_) {
    busy_ns_.store(0, std::memory_order_relaxed);
    begun_ns = now_ns();
  }
  for (first_task_ = 0; first_task_ < num_tasks; first_task_ += kTaskMask) {
    run_piece(num_tasks - first_task_ < kTaskMask ? num_tasks - first_task_ : kTaskMask);
  }
  if (!is_timed_) return;
  const int64_t shared_ns = busy_ns_.load(std::memory_order_relaxed) / num_threads_;
  clock->current().lost_ns += now_ns() - begun_ns - shared_ns;
}

void ThreadPool::run_piece(uint64_t num_tasks) {
  num_pending_.store(num_tasks);
  work_.store(num_tasks << kTaskBits);
  if (num_sleepers_.load() != 0) {
    const std::lock_guard lock(mutex_);
    work_arrived_.notify_all();
  }
  while (take_and_run(0)) {
  }
  wait_until_done();
}

void ThreadPool::wait_until_done() {
  const auto is_done = [this] { return num_pending_.load() == 0; };
  fetch_expected(0, caller_fetched_, is_done);
  if (spin_until(spin_ns_, is_done)) return;
  std::unique_lock lock(mutex_);
  caller_sleeps_.store(true);
  while (!is_done()) all_done_.wait_for(lock, kSleepBound);
  caller_sleeps_.store(false);
}

void ThreadPool::wait_for_work(uint32_t thread, IdleSpin& idle, uint32_t& fetched) {
  const auto may_go = [this] { return has_work() || is_stopping_.load(); };
  const auto fetch_or_go = [&] {
    if (may_go()) return true;
    fetch_expected(thread, fetched, may_go);
    return false;
  };
  const int64_t begun_ns = now_ns();
  if (!spin_until(idle.budget_ns(), fetch_or_go)) {
    std::unique_lock lock(mutex_);
    num_sleepers_.fetch_add(1);
    while (!may_go()) work_arrived_.wait_for(lock, kSleepBound);
    num_sleepers_.fetch_sub(1);
  }
  idle.came_after(now_ns() - begun_ns);
}

void ThreadPool::thread_main(uint32_t thread) {
  const CanonicalFloatMode mode;
  IdleSpin idle(spin_ns_);
  uint32_t fetched = 0;
  while (!is_stopping_.load()) {
    if (!take_and_run(thread)) wait_for_work(thread, idle, fetched);
  }
}

}  // namespace dflash::compute
