// The pulse and the thread that sends it.
// SPDX-License-Identifier: Apache-2.0
#include "worker/pulse.h"

#include <chrono>
#include <string>
#include <system_error>
#include <utility>

namespace dflash::worker {

bool PulseSender::send(uint64_t counter) {
  // A TCP socket that fills up (because a host reads nothing for hours) takes part of a pulse. The
  // rest goes first, or every later pulse would be garbage to the host.
  if (num_sent_ == wire::kPulseBytes) {
    wire::encode_pulse(counter, message_);
    num_sent_ = 0;
  }
  const iovec rest{message_.data() + num_sent_, wire::kPulseBytes - num_sent_};
  const auto sent = socket_.send({&rest, 1});
  if (!sent.ok()) return false;
  // The socket is full, so that this pulse is dropped.
  if (sent.value() == 0 && num_sent_ == 0) num_sent_ = wire::kPulseBytes;
  num_sent_ += sent.value();
  return true;
}

Status Pulse::start(transport::StreamSocket socket) {
  stop();
  if (!socket.is_open())
    return Error{ErrorCode::kInvalidArgument, "a pulse needs a connected socket"};
  sender_ = PulseSender(std::move(socket));
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
  sender_.close();
}

void Pulse::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_ && sender_.send(counter_.load(std::memory_order_relaxed)))
    wake_.wait_for(lock, std::chrono::milliseconds(wire::kPulsePeriodMs));
}

}  // namespace dflash::worker
