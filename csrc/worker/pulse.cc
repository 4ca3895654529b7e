// The pulse's thread. It sends without blocking, and never leaves a pulse half sent for good.
// SPDX-License-Identifier: Apache-2.0
#include "worker/pulse.h"

#include <chrono>
#include <string>
#include <system_error>

#include "wire/pulse.h"

namespace dflash::worker {
Status Pulse::start(transport::StreamSocket socket) {
  stop();
  if (!socket.is_open())
    return Error{ErrorCode::kInvalidArgument, "a pulse needs a connected socket"};
  socket_ = std::move(socket);
  stopping_ = false;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return Error{ErrorCode::kSystem, std::string("cannot start the pulse thread: ") + error.what()};
  }
  return ok();
}

void Pulse::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  socket_.close();
}

void Pulse::run() {
  std::byte message[wire::kPulseBytes];
  size_t num_sent = wire::kPulseBytes;  // bytes of `message` that have been sent
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    // A TCP socket that fills up (because a host reads nothing for hours) takes part of a pulse.
    // The rest goes first, or every later pulse would be garbage to the host.
    if (num_sent == wire::kPulseBytes) {
      wire::encode_pulse(counter_.load(std::memory_order_relaxed), message);
      num_sent = 0;
    }
    const iovec rest{message + num_sent, wire::kPulseBytes - num_sent};
    const auto sent = socket_.send({&rest, 1});
    if (!sent.ok()) return;  // the host is gone
    // The socket is full, so that this pulse is dropped.
    if (sent.value() == 0 && num_sent == 0) num_sent = wire::kPulseBytes;
    num_sent += sent.value();
    wake_.wait_for(lock, std::chrono::milliseconds(wire::kPulsePeriodMs));
  }
}

}  // namespace dflash::worker
