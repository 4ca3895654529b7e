// SPDX-License-Identifier: Apache-2.0
#include "worker/pulse.h"

#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <system_error>

namespace dflash::worker {
namespace {

template <class Word>
void store_little_endian(Word value, std::byte* out) {
  for (size_t i = 0; i < sizeof(Word); ++i) out[i] = static_cast<std::byte>((value >> (8 * i)) & 0xff);
}

}  // namespace

void encode_pulse(uint64_t counter, std::span<std::byte, kPulseBytes> out) {
  store_little_endian(kPulseMagic, out.data());
  store_little_endian(kPulseVersion, out.data() + 4);
  store_little_endian(counter, out.data() + 8);
}

Status Pulse::start(OwnedFd socket) {
  stop();
  if (!socket.is_open()) return Error{ErrorCode::kInvalidArgument, "a pulse needs a connected socket"};
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
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    std::byte message[kPulseBytes];
    encode_pulse(counter_.load(std::memory_order_relaxed), message);
    // A full socket means that the host is not reading; it will see a later pulse. 16 bytes are sent whole or not at all on a
    // Unix socket; on TCP a short send leaves the rest for the host's reader to reject, which only a broken link can cause.
    const ssize_t sent = ::send(socket_.get(), message, sizeof message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) return;  // the host is gone
    wake_.wait_for(lock, std::chrono::milliseconds(kPulsePeriodMs));
  }
}

}  // namespace dflash::worker
