// What takes the place of the product's clock (base/clock.cc) and of its waits (transport/wait.cc,
// base/timed_wait.cc) in a simulation. All are in virtual time; outside of a simulation the clock
// is the machine's, so that whoever sets one up may use anything. wait_any polls, and otherwise
// gives way until the next event. It never spins and arms no channel, because links wake whoever
// listens to them (simulated_link.h).
// SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <time.h>

#include <algorithm>
#include <unordered_map>

#include "base/clock.h"
#include "base/timed_wait.h"
#include "simulation/scheduler.h"
#include "transport/channel.h"

namespace dflash {
namespace {

// Whom a notification wakes.
thread_local std::unordered_map<const std::condition_variable*, simulation::Task*> waiters;

}  // namespace

int64_t now_ns() {
  if (simulation::Scheduler::is_running()) return simulation::Scheduler::current().now_ns();
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// Simulated threads never share a core.
int64_t thread_cpu_ns() { return now_ns(); }

void nap_ns(int64_t nanoseconds) {
  const simulation::Scheduler& scheduler = simulation::Scheduler::current();
  scheduler.running()->sleep_until(scheduler.now_ns() + nanoseconds);
}

// The lock must be given up although all fibres are of one thread: the next one may take it.
void wait_for_ns(std::condition_variable& condition, std::unique_lock<std::mutex>& lock,
                 int64_t nanoseconds) {
  const simulation::Scheduler& scheduler = simulation::Scheduler::current();
  waiters[&condition] = scheduler.running();
  lock.unlock();
  scheduler.running()->await_another(scheduler.now_ns() + nanoseconds);
  lock.lock();
  waiters.erase(&condition);
}

void notify_waiter(std::condition_variable& condition) {
  const auto found = waiters.find(&condition);
  if (found != waiters.end()) found->second->wake();
}

}  // namespace dflash

namespace dflash::transport {
namespace {

bool is_filled(const WaitEntry& entry) {
  return entry.arrival.has_value() || entry.error.has_value();
}

bool poll_all(std::span<WaitEntry> entries) {
  bool found = false;
  for (WaitEntry& entry : entries) {
    if (entry.channel == nullptr) continue;
    auto polled = entry.channel->poll();
    if (!polled.ok()) {
      entry.error = std::move(polled).error();
    } else {
      entry.arrival = polled.value();
    }
    found = found || is_filled(entry);
  }
  return found;
}

bool is_readable(int fd) {
  if (fd < 0) return false;
  pollfd awaited{fd, POLLIN, 0};
  return ::poll(&awaited, 1, 0) > 0;
}

// Says which peers have hung up their other socket; data there ends no wait.
bool note_hangups(std::span<WaitEntry> entries, const simulation::Scheduler& scheduler) {
  bool found = false;
  for (WaitEntry& entry : entries) {
    if (entry.channel == nullptr || entry.hangup_fd < 0) continue;
    entry.has_hung_up = scheduler.has_hung_up(entry.hangup_fd);
    found = found || entry.has_hung_up;
  }
  return found;
}

}  // namespace

void wait_any(std::span<WaitEntry> entries, Deadline deadline, int64_t /*spin_ns*/, int wake_fd,
              int64_t /*quiet_until_ns*/) {
  if (std::any_of(entries.begin(), entries.end(), is_filled)) return;
  simulation::Scheduler& scheduler = simulation::Scheduler::current();
  simulation::Task& task = *scheduler.running();
  scheduler.count_wait();
  while (!poll_all(entries) && !is_readable(wake_fd) && !note_hangups(entries, scheduler) &&
         !deadline.has_passed() && !task.is_killed()) {
    task.sleep_until(deadline.when_ns());
  }
}

}  // namespace dflash::transport
