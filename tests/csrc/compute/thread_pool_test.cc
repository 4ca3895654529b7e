// The pool under several callers: each job runs alone and whole, and callers are served in order.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/thread_pool.h"

#include <doctest/doctest.h>

#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/operator_clock.h"

using namespace dflash;
using compute::ThreadPool;

TEST_CASE("jobs of several callers run one at a time, and each runs whole") {
  for (const uint32_t num_threads : {1u, 3u}) {
    auto made = ThreadPool::create(num_threads, {}, 0);
    REQUIRE(made.ok());
    ThreadPool& pool = *made.value();
    std::atomic<int> jobs_under_way{0};
    std::atomic<bool> met{false};
    std::atomic<uint64_t> tasks_run{0};
    constexpr uint64_t kTasks = 37, kJobs = 200, kCallers = 4;
    std::vector<std::thread> callers;
    for (uint64_t caller = 0; caller < kCallers; ++caller) {
      callers.emplace_back([&] {
        for (uint64_t job = 0; job < kJobs; ++job) {
          std::atomic<uint64_t> begun{0}, ended{0};
          pool.run(kTasks, [&](uint64_t) {
            if (begun.fetch_add(1) == 0 && jobs_under_way.fetch_add(1) != 0) met.store(true);
            tasks_run.fetch_add(1);
            if (ended.fetch_add(1) == kTasks - 1) jobs_under_way.fetch_sub(1);
          });
          if (ended.load() != kTasks) met.store(true);
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
    CHECK_FALSE(met.load());
    CHECK(tasks_run.load() == kCallers * kJobs * kTasks);
  }
}

TEST_CASE("the caller's clock learns what a job lost, and what runs alone loses nothing") {
  auto made = ThreadPool::create(2, {}, 0);
  REQUIRE(made.ok());
  const auto lost_of = [&](uint64_t num_tasks) {
    OperatorClock::start();
    {
      const OperatorScope scope(Operator::kNorm);
      // One task naps, so that the other thread has nothing to do meanwhile.
      made.value()->run(num_tasks, [](uint64_t task) {
        if (task == 0) nap_ns(2'000'000);
      });
    }
    for (const OperatorTimes& one : OperatorClock::stop())
      if (one.which == Operator::kNorm) return std::pair(one.own_ns, one.lost_ns);
    return std::pair(int64_t{0}, int64_t{-1});
  };
  const auto [own_ns, lost_ns] = lost_of(2);
  CHECK(lost_ns > 0);
  CHECK(lost_ns < own_ns);
  CHECK(lost_of(1).second == 0);
}

TEST_CASE("what is expected of the next job is a guess that harms none: the memory may be gone") {
  for (const uint32_t num_threads : {1u, 3u}) {
    auto made = ThreadPool::create(num_threads, {}, 50'000);
    REQUIRE(made.ok());
    ThreadPool& pool = *made.value();
    CHECK(pool.expected().begin == nullptr);
    const auto* const nowhere = reinterpret_cast<const std::byte*>(uintptr_t{4096});
    for (uint64_t job = 0; job < 200; ++job) {
      pool.expect({nowhere, size_t{1} << (job % 40)});
      std::atomic<uint64_t> sum{0};
      pool.run(5, [&](uint64_t task) { sum.fetch_add(task); });
      CHECK(sum.load() == 10);
    }
    CHECK(pool.expected().begin == (num_threads == 1 ? nullptr : nowhere));
  }
}
