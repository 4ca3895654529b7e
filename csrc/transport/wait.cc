// Waits on any number of channels: it spins on poll(), then sleeps on what the channels say.
// SPDX-License-Identifier: Apache-2.0
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "transport/channel.h"

namespace dflash::transport {
namespace {

// Reading the clock costs as much as several polls of a ring, so that many go to one reading.
constexpr int kPollsPerClockRead = 16;
// How often a spinning waiter looks at wake_fd, which takes a system call.
constexpr int64_t kWakeCheckNs = 20'000;
// The longest sleep where a futex and descriptors are awaited together.
constexpr int64_t kMixedSleepNs = 1'000'000;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

timespec timespec_of(int64_t ns) {
  return {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
}

bool is_filled(const WaitEntry& entry) {
  return entry.arrival.has_value() || entry.error.has_value();
}

// Returns true if anything arrived or failed.
bool poll_all(std::span<WaitEntry> entries) {
  bool found = false;
  for (WaitEntry& entry : entries) {
    if (entry.channel == nullptr) continue;
    auto polled = entry.channel->poll();
    if (!polled.ok()) {
      entry.error = std::move(polled).error();
    } else if (polled.value().has_value()) {
      entry.arrival = polled.value();
    } else {
      continue;
    }
    found = true;
  }
  return found;
}

bool is_readable(int fd) {
  if (fd < 0) return false;
  pollfd awaited{fd, POLLIN, 0};
  return ::poll(&awaited, 1, 0) > 0;
}

int64_t next_event_ns(std::span<const WaitEntry> entries) {
  int64_t next = std::numeric_limits<int64_t>::max();
  for (const WaitEntry& entry : entries) {
    if (entry.channel != nullptr) next = std::min(next, entry.channel->next_event_ns());
  }
  return next;
}

void sleep_on_futex(const WakeSource& source, Deadline deadline) {
  // FUTEX_WAIT_BITSET takes an absolute time of CLOCK_MONOTONIC.
  const timespec until = timespec_of(deadline.when_ns());
  ::syscall(SYS_futex, source.futex_word, FUTEX_WAIT_BITSET, source.expected, &until, nullptr,
            FUTEX_BITSET_MATCH_ANY);
}

// Returns true if `wake_fd`, which is the last of `fds` where there is one, became ready.
bool sleep_on_fds(std::vector<pollfd>& fds, Deadline deadline, bool has_wake_fd) {
  const timespec left = timespec_of(deadline.left_ns());
  const int ready = ::ppoll(fds.data(), fds.size(), &left, nullptr);
  return has_wake_fd && ready > 0 && fds.back().revents != 0;
}

enum class Woken : uint8_t { kLookAgain, kArrived, kWakeFd };

// Arms every channel, polls once more where that is needed, sleeps, and disarms. The caller has
// just polled without result.
class Sleeper {
 public:
  Sleeper(std::span<WaitEntry> entries, int wake_fd) : entries_(entries), wake_fd_(wake_fd) {
    const auto channels = std::count_if(entries.begin(), entries.end(),
                                        [](const WaitEntry& e) { return e.channel != nullptr; });
    kind_ = channels == 1 && wake_fd < 0 ? SleepKind::kFutex : SleepKind::kPoll;
    fds_.reserve(static_cast<size_t>(channels) + 1);
  }

  Woken sleep(Deadline deadline) {
    arm();
    Woken woken = Woken::kLookAgain;
    if (needs_poll_ && poll_all(entries_)) {
      woken = Woken::kArrived;
    } else {
      const Deadline until = deadline.earlier(Deadline::at_ns(next_event_ns(entries_)));
      if (num_futexes_ == 1 && fds_.empty()) {
        sleep_on_futex(futex_, until);
      } else if (sleep_on_fds(fds_, bounded(until), wake_fd_ >= 0)) {
        woken = Woken::kWakeFd;
      }
    }
    for (const WaitEntry& entry : entries_) {
      if (entry.channel != nullptr) entry.channel->disarm();
    }
    return woken;
  }

 private:
  void arm() {
    fds_.clear();
    futex_ = WakeSource();
    num_futexes_ = 0;
    needs_poll_ = false;
    for (const WaitEntry& entry : entries_) {
      if (entry.channel == nullptr) continue;
      const WakeSource source = entry.channel->arm(kind_);
      needs_poll_ = needs_poll_ || !source.is_level_triggered;
      if (source.futex_word == nullptr) {
        fds_.push_back({source.fd, source.events, 0});
      } else {
        ++num_futexes_;
        futex_ = source;
      }
    }
    // No single call sleeps on two futexes, or on one beside a wake_fd. Descriptors then carry the
    // sleep, in short pieces.
    if (wake_fd_ >= 0) fds_.push_back({wake_fd_, POLLIN, 0});
  }

  Deadline bounded(Deadline until) const {
    return num_futexes_ == 0 ? until : until.earlier(Deadline::after_ns(kMixedSleepNs));
  }

  std::span<WaitEntry> entries_;
  int wake_fd_;
  SleepKind kind_;
  std::vector<pollfd> fds_;
  WakeSource futex_;
  int num_futexes_ = 0;
  bool needs_poll_ = false;
};

// Returns true if something arrived, the deadline passed or wake_fd became readable.
bool spin(std::span<WaitEntry> entries, Deadline deadline, int64_t spin_ns, int wake_fd) {
  const int64_t start_ns = now_ns();
  const int64_t end_ns = start_ns + spin_ns;
  int64_t wake_check_ns = start_ns + kWakeCheckNs;
  for (;;) {
    for (int i = 0; i < kPollsPerClockRead; ++i) {
      if (poll_all(entries)) return true;
      pause();
    }
    const int64_t now = now_ns();
    if (now >= deadline.when_ns()) return true;
    if (now >= end_ns) return false;
    if (wake_fd >= 0 && now >= wake_check_ns) {
      if (is_readable(wake_fd)) return true;
      wake_check_ns = now + kWakeCheckNs;
    }
  }
}

// Returns true if something arrived or failed, or wake_fd became readable.
bool sleep_until(Deadline deadline, std::span<WaitEntry> entries, int wake_fd) {
  if (deadline.has_passed()) return false;
  Sleeper sleeper(entries, wake_fd);
  do {
    if (sleeper.sleep(deadline) != Woken::kLookAgain || poll_all(entries)) return true;
  } while (!deadline.has_passed());
  return false;
}

}  // namespace

void wait_any(std::span<WaitEntry> entries, Deadline deadline, int64_t spin_ns, int wake_fd,
              int64_t quiet_until_ns) {
  if (std::any_of(entries.begin(), entries.end(), is_filled)) return;
  if (poll_all(entries) || is_readable(wake_fd)) return;
  if (spin_ns > 0) {
    if (quiet_until_ns > 0) {
      const Deadline quiet = deadline.earlier(Deadline::at_ns(quiet_until_ns));
      if (sleep_until(quiet, entries, wake_fd)) return;
    }
    if (spin(entries, deadline, spin_ns, wake_fd)) return;
  }
  sleep_until(deadline, entries, wake_fd);
}

}  // namespace dflash::transport
