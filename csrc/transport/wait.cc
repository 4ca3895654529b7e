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
// The longest sleep on a futex while a socket is watched for its end, which no futex can see.
constexpr int64_t kHangupCheckNs = 5'000'000;

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

constexpr short kHangupEvents = POLLRDHUP;  // POLLHUP and POLLERR are told without being asked for

bool is_watched(const WaitEntry& entry) { return entry.channel != nullptr && entry.hangup_fd >= 0; }

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

enum class Woken : uint8_t { kLookAgain, kArrived, kWakeFd, kHungUp };

// One sleep: arms every channel, so that what arrives from then on ends the sleep, sleeps, and
// disarms. The caller's poll has just found nothing. What came between that poll and the arming
// would end no sleep, unless the channel is level-triggered (WakeSource). Where one is not, all are
// polled once more after the arming.
class Sleeper {
 public:
  Sleeper(std::span<WaitEntry> entries, int wake_fd) : entries_(entries), wake_fd_(wake_fd) {
    const auto channels = std::count_if(entries.begin(), entries.end(),
                                        [](const WaitEntry& e) { return e.channel != nullptr; });
    kind_ = channels == 1 && wake_fd < 0 ? SleepKind::kFutex : SleepKind::kPoll;
    has_watched_ = std::any_of(entries.begin(), entries.end(), is_watched);
    fds_.reserve(2 * static_cast<size_t>(channels) + 1);
  }

  Woken sleep(Deadline deadline) {
    arm();
    Woken woken = Woken::kLookAgain;
    if (needs_poll_ && poll_all(entries_)) {
      woken = Woken::kArrived;
    } else {
      const Deadline until = deadline.earlier(Deadline::at_ns(next_event_ns(entries_)));
      woken = num_futexes_ == 1 && fds_.empty() ? sleep_on_word(until) : sleep_on_fds(until);
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

  Woken sleep_on_word(Deadline until) {
    if (!has_watched_) {
      sleep_on_futex(futex_, until);
      return Woken::kLookAgain;
    }
    sleep_on_futex(futex_, until.earlier(Deadline::after_ns(kHangupCheckNs)));
    first_watched_ = 0;
    watch();
    return ::poll(fds_.data(), fds_.size(), 0) > 0 && note_hangups() ? Woken::kHungUp
                                                                     : Woken::kLookAgain;
  }

  Woken sleep_on_fds(Deadline until) {
    first_watched_ = fds_.size();
    watch();
    const timespec left = timespec_of(bounded(until).left_ns());
    if (::ppoll(fds_.data(), fds_.size(), &left, nullptr) <= 0) return Woken::kLookAgain;
    if (note_hangups()) return Woken::kHungUp;
    const bool is_woken = wake_fd_ >= 0 && fds_[first_watched_ - 1].revents != 0;
    return is_woken ? Woken::kWakeFd : Woken::kLookAgain;
  }

  void watch() {
    for (const WaitEntry& entry : entries_) {
      if (is_watched(entry)) fds_.push_back({entry.hangup_fd, kHangupEvents, 0});
    }
  }
  bool note_hangups() {
    size_t at = first_watched_;
    bool found = false;
    for (WaitEntry& entry : entries_) {
      if (!is_watched(entry) || fds_[at++].revents == 0) continue;
      entry.has_hung_up = true;
      found = true;
    }
    return found;
  }

  Deadline bounded(Deadline until) const {
    return num_futexes_ == 0 ? until : until.earlier(Deadline::after_ns(kMixedSleepNs));
  }

  std::span<WaitEntry> entries_;
  int wake_fd_;
  SleepKind kind_;
  bool has_watched_ = false;
  std::vector<pollfd> fds_;   // of channels, then wake_fd, then those watched for a hang-up
  size_t first_watched_ = 0;  // of fds_
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

// Returns true if something arrived, failed or hung up, or wake_fd became readable.
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
