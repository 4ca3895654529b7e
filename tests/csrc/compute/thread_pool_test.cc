// The pool under several callers: each job runs alone and whole, and callers are served in order.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/thread_pool.h"

#include <doctest/doctest.h>

#include <atomic>
#include <thread>
#include <vector>

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
