// Virtual time and its tasks: order, waking, freezing, killing.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/scheduler.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "base/clock.h"
#include "base/timed_wait.h"

namespace dflash::simulation {
namespace {

constexpr int64_t kHourNs = 3'600'000'000'000;

// Runs until nothing is left to happen.
void run_all(Scheduler& scheduler) {
  CHECK(!scheduler.run([] { return false; }));
}

TEST_CASE("events happen in the order of their times, and of their making at one time") {
  Scheduler scheduler;
  std::string order;
  scheduler.after(20, [&] { order += 'c'; });
  scheduler.after(10, [&] { order += 'a'; });
  scheduler.after(10, [&] { order += 'b'; });
  run_all(scheduler);
  CHECK(order == "abc");
}

TEST_CASE("an hour of sleep takes no time, and the real clock's functions tell the virtual one") {
  Scheduler scheduler;
  int64_t before = 0, after = 0;
  const auto task = scheduler.spawn([&] {
    before = now_ns();
    nap_ns(kHourNs);
    after = now_ns();
  });
  run_all(scheduler);
  CHECK(task->is_over());
  CHECK(after - before == kHourNs);
}

TEST_CASE("a sleeper that is woken goes on at once, and its former timer wakes it no more") {
  Scheduler scheduler;
  std::vector<int64_t> woken;
  const auto task = scheduler.spawn([&] {
    const int64_t began = now_ns();
    for (int i = 0; i < 2; ++i) {
      scheduler.running()->sleep_until(began + 100 * (i + 1));
      woken.push_back(now_ns() - began);
    }
  });
  scheduler.after(30, [&] { task->wake(); });
  run_all(scheduler);
  CHECK(woken == std::vector<int64_t>{30, 200});
}

TEST_CASE("a frozen task does nothing until it is thawed") {
  Scheduler scheduler;
  int64_t ended = 0;
  const int64_t began = scheduler.now_ns();
  const auto task = scheduler.spawn([&] {
    nap_ns(10);
    ended = now_ns();
  });
  scheduler.after(5, [&] { task->freeze(); });
  scheduler.after(50, [&] { task->thaw(); });
  run_all(scheduler);
  CHECK(ended - began == 50);
}

TEST_CASE("a killed task returns from all its waits, also where it is frozen") {
  Scheduler scheduler;
  const auto task = scheduler.spawn([&] {
    while (!scheduler.running()->is_killed()) nap_ns(kHourNs);
    nap_ns(kHourNs);
  });
  const int64_t began = scheduler.now_ns();
  scheduler.after(5, [&] { task->freeze(); });
  scheduler.after(7, [&] { task->kill(); });
  scheduler.run([&] { return task->is_over(); });
  CHECK(scheduler.now_ns() - began == 7);
}

TEST_CASE("a timed wait ends when it is told, or with its time, and another task has the mutex") {
  Scheduler scheduler;
  std::mutex mutex;
  std::condition_variable told;
  std::vector<int64_t> waited;
  const auto waiter = scheduler.spawn([&] {
    std::unique_lock lock(mutex);
    for (int i = 0; i < 2; ++i) {
      const int64_t began = now_ns();
      wait_for_ns(told, lock, 100);
      waited.push_back(now_ns() - began);
    }
  });
  const auto teller = scheduler.spawn([&] {
    nap_ns(30);
    const std::lock_guard lock(mutex);
    notify_waiter(told);
  });
  run_all(scheduler);
  CHECK(waited == std::vector<int64_t>{30, 100});
  CHECK(teller->is_over());
  CHECK(waiter->is_over());
}

TEST_CASE("time passes while a killed task waits for some of it to pass") {
  Scheduler scheduler;
  std::mutex mutex;
  std::condition_variable told;
  int64_t waited_ns = 0;
  const auto waiter = scheduler.spawn([&] {
    std::unique_lock lock(mutex);
    const int64_t began = now_ns();
    while (waited_ns < 100) {
      wait_for_ns(told, lock, 30);
      waited_ns = now_ns() - began;
    }
  });
  scheduler.after(5, [&] { waiter->kill(); });
  scheduler.run([&] { return waiter->is_over(); });
  CHECK(waited_ns >= 100);
  CHECK(waited_ns < 130);
}

TEST_CASE("a killed task still waits for another one of its process to return") {
  Scheduler scheduler;
  std::mutex mutex;
  std::condition_variable told;
  bool is_done = false;
  const auto waiter = scheduler.spawn([&] {
    std::unique_lock lock(mutex);
    while (!is_done) wait_for_ns(told, lock, 100);
  });
  const auto worker = scheduler.spawn([&] {
    nap_ns(kHourNs);
    is_done = true;
  });
  scheduler.after(5, [&] {
    waiter->kill();
    worker->kill();
  });
  scheduler.run([&] { return waiter->is_over(); });
  CHECK(waiter->is_over());
  CHECK(is_done);
}

}  // namespace
}  // namespace dflash::simulation
