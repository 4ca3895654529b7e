// Reads pulses from their socket. They may arrive in pieces or many at once.
// SPDX-License-Identifier: Apache-2.0
#include "client/liveness.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <span>

#include "base/clock.h"
#include "wire/frame.h"

namespace dflash::client {

std::string seconds_text(int64_t nanoseconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(nanoseconds) / 1e9);
  return text;
}

std::optional<std::string> Liveness::read_pulses(int64_t now) {
  std::optional<std::string> failure;
  while (pulse_.is_open() && read_once(now, failure)) {
  }
  return failure;
}

// Reads once. Returns true if there may be more to read.
bool Liveness::read_once(int64_t now, std::optional<std::string>& failure) {
  std::byte buffer[64 * wire::kPulseBytes];
  const ssize_t received = ::recv(pulse_.get(), buffer, sizeof buffer, MSG_DONTWAIT);
  if (received < 0) {
    if (errno == EINTR) return true;
    if (errno != EAGAIN && errno != EWOULDBLOCK)
      failure = std::string("its pulse connection failed: ") + std::strerror(errno);
    return false;
  }
  if (received == 0) {
    failure = "hung up";
    return false;
  }
  incomplete_.insert(incomplete_.end(), buffer, buffer + received);
  size_t at = 0;
  for (; incomplete_.size() - at >= wire::kPulseBytes; at += wire::kPulseBytes) {
    const auto counter = wire::decode_pulse(
        std::span<const std::byte, wire::kPulseBytes>(&incomplete_[at], wire::kPulseBytes));
    if (!counter) {
      failure = "sent bytes that are no pulse";
      return false;
    }
    last_pulse_ns_ = now_ns();
    if (*counter != last_counter_) {
      last_counter_ = *counter;
      last_change_ns_ = now;
    }
  }
  incomplete_.erase(incomplete_.begin(), incomplete_.begin() + static_cast<std::ptrdiff_t>(at));
  return static_cast<size_t>(received) == sizeof buffer;
}

}  // namespace dflash::client
