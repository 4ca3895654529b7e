// transport::wait_any in virtual time: it polls, and otherwise gives way until the next event. It
// never spins and arms no channel, because links wake whoever listens to them (link.h).
// SPDX-License-Identifier: Apache-2.0
#include <poll.h>

#include <algorithm>

#include "simulation/scheduler.h"
#include "transport/channel.h"

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
