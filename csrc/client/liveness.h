// Whether a worker is still alive, judged by its pulses. It is not if their socket hangs up, if
// bytes come that are no pulse, or if the progress counter stands still while the worker owes
// something. Whoever has the turn (turn.h) uses it; nothing here blocks.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/owned_fd.h"

namespace dflash::client {

// A time in seconds with one decimal, such as "2.0 s".
std::string seconds_text(int64_t nanoseconds);

class Liveness {
 public:
  // Without a socket, the worker lives in this process.
  explicit Liveness(OwnedFd pulse) : pulse_(std::move(pulse)) {}

  // Says that the worker begins to owe something: its time counts from here.
  void begin_to_owe(int64_t now) {
    last_change_ns_ = now;
    is_resting_ = false;
  }
  // Says that something waits to be sent to the worker, which owes nothing. If it was at rest, its
  // time counts from here: what it did before says nothing.
  void begin_to_wait(int64_t now) {
    if (is_resting_) begin_to_owe(now);
  }
  // Says that nothing is expected of the worker.
  void rest() { is_resting_ = true; }
  // Reads every pulse that waits. Returns a reason if the worker must be given up.
  std::optional<std::string> read_pulses(int64_t now);
  // Whether there are pulses. A worker in this process is never judged.
  bool is_judged() const { return pulse_.is_open(); }
  // Whether the counter has stood still for `stall_ns`; asked of a worker that owes something.
  bool is_stalled(int64_t now, int64_t stall_ns) const {
    return is_judged() && now - last_change_ns_ > stall_ns;
  }
  std::string stall_text(int64_t now) const {
    return "no progress for " + seconds_text(now - last_change_ns_);
  }
  // The last counter that the worker sent. It changes when the worker makes progress.
  uint64_t counter() const { return last_counter_; }
  // When the last pulse was read, by the machine's clock; 0 where none ever was.
  int64_t last_pulse_ns() const { return last_pulse_ns_; }
  // The socket, whose end tells at once that the process is gone; -1 where there is none.
  int fd() const { return pulse_.is_open() ? pulse_.get() : -1; }
  void close() { pulse_.close(); }

 private:
  bool read_once(int64_t now, std::optional<std::string>& failure);

  OwnedFd pulse_;
  bool is_resting_ = true;
  uint64_t last_counter_ = 0;
  int64_t last_pulse_ns_ = 0;
  int64_t last_change_ns_ = 0;         // when the counter changed, or the worker began to owe
  std::vector<std::byte> incomplete_;  // the beginning of a pulse whose rest has not come yet
};

}  // namespace dflash::client
