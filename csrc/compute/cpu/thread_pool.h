// The compute threads of one worker, or of a host. run() splits a job into tasks that own their
// outputs; the caller works on them too and returns when all are done. Jobs of several callers run
// one at a time, first come, first served. Idle threads sleep; before that they spin (IdleSpin),
// but for pools whose budget is zero, because CPUs are short.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/idle_spin.h"
#include "base/result.h"

namespace dflash::compute {

// The bytes that the tasks of a job read first: task i those from begin + i * task_bytes on.
struct FirstReads {
  const std::byte* begin = nullptr;  // null where they are not known
  size_t task_bytes = 0;
};

// Destroying it joins the threads; no run may be under way then.
class ThreadPool {
 public:
  // Starts num_threads - 1 threads. Thread i >= 1 is pinned to cpus[i] where given; the caller pins
  // itself to cpus[0] if it likes. Each thread sets the canonical floating-point mode. Errors:
  // kInvalidArgument for a thread count or a cpu that cannot be, kSystem naming what failed.
  static Result<std::unique_ptr<ThreadPool>> create(uint32_t num_threads,
                                                    const std::vector<int>& cpus, int64_t spin_ns);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  uint32_t num_threads() const { return num_threads_; }

  // Calls body(task) once for each task in [0, num_tasks), in any order and from any of the
  // threads. Any thread may call this, but for one that runs a task; it waits for the jobs that
  // came before. All outputs are visible to it when it returns. A task must not wait for anything.
  template <class Body>
  void run(uint64_t num_tasks, Body&& body) {
    using Type = std::remove_reference_t<Body>;
    run_tasks(
        num_tasks,
        [](void* context, uint64_t task, uint32_t) { (*static_cast<Type*>(context))(task); },
        &body);
  }
  // Does the same with body(task, thread), where `thread` < num_threads says who runs the task, for
  // scratch of a thread's own.
  template <class Body>
  void run_on_threads(uint64_t num_tasks, Body&& body) {
    using Type = std::remove_reference_t<Body>;
    run_tasks(
        num_tasks,
        [](void* context, uint64_t task, uint32_t thread) {
          (*static_cast<Type*>(context))(task, thread);
        },
        &body);
  }

  // Says what the job after the one that runs now or next reads first. A thread that has no task
  // meanwhile fetches its part, so that memory is not idle while a job ends or one thread computes
  // what is between two jobs. It is a guess: the memory need not be there any more. Pools whose
  // threads never spin take no notice.
  void expect(const FirstReads& reads);
  FirstReads expected() const;

 private:
  using TaskFunction = void (*)(void* context, uint64_t task, uint32_t thread);

  ThreadPool(uint32_t num_threads, int64_t spin_ns)
      : num_threads_(num_threads), spin_ns_(spin_ns) {}
  void run_tasks(uint64_t num_tasks, TaskFunction function, void* context);
  void run_job(uint64_t num_tasks, TaskFunction function, void* context);
  void run_piece(uint64_t num_tasks);
  void await_turn();
  void end_turn();
  void thread_main(uint32_t thread);
  bool take_and_run(uint32_t thread);
  bool has_work() const;
  template <class Condition>
  void fetch_expected(uint32_t thread, uint32_t& fetched, const Condition& may_go) const;
  void wait_for_work(uint32_t thread, IdleSpin& idle, uint32_t& fetched);
  void wait_until_done();

  const uint32_t num_threads_;
  const int64_t spin_ns_;
  // Written by the caller while no task is pending, and published by work_.
  TaskFunction function_ = nullptr;
  void* context_ = nullptr;
  bool is_timed_ = false;    // whether the caller's clock runs
  uint64_t first_task_ = 0;  // the first task of the piece that work_ counts
  // num_tasks << 24 | next task. Both are in one word, so that a thread that wakes late can never
  // take a task of a job that it does not see.
  alignas(64) std::atomic<uint64_t> work_{0};
  // Tasks that are not finished. Its decrement publishes their outputs to the caller.
  alignas(64) std::atomic<uint64_t> num_pending_{0};
  // Time in the tasks of a timed job, all threads together. Relaxed: num_pending_ publishes it.
  std::atomic<int64_t> busy_ns_{0};
  // What expect() has said, and how often it has said something. Relaxed: bytes that are fetched in
  // vain, because only one of the two is the new one, do no harm.
  alignas(64) std::atomic<const std::byte*> expected_begin_{nullptr};
  std::atomic<size_t> expected_bytes_{0};
  std::atomic<uint32_t> num_expected_{0};
  uint32_t caller_fetched_ = 0;  // of num_expected_, by whoever runs the job
  std::atomic<uint32_t> num_sleepers_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> is_stopping_{false};
  // Callers draw numbers and are served in their order.
  std::mutex turn_mutex_;
  std::condition_variable turn_ended_;
  uint64_t next_turn_ = 0;  // the number that the next caller draws; guarded by turn_mutex_
  uint64_t turn_ = 0;       // the number whose job runs; guarded by turn_mutex_
  std::mutex mutex_;        // guards the protocol of sleep and wake, and no data
  std::condition_variable work_arrived_;
  std::condition_variable all_done_;
  std::vector<std::thread> threads_;
};

}  // namespace dflash::compute
