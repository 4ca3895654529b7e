// The worker's heartbeat: a C++ thread that reports the progress counter. A stuck work loop is
// therefore seen as frozen, and a busy Python interpreter is not. The bytes are those of
// wire/frame.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/result.h"
#include "transport/secure/stream_socket.h"
#include "wire/frame.h"

namespace dflash::worker {

// Sends pulses whenever it is asked to. It never blocks, and never leaves a pulse half sent for
// good.
class PulseSender {
 public:
  explicit PulseSender(transport::StreamSocket socket) : socket_(std::move(socket)) {}

  // Sends a pulse with this counter. A full socket drops the pulse. Returns false if the host is
  // gone, so that further pulses are pointless.
  bool send(uint64_t counter);
  bool is_open() const { return socket_.is_open(); }
  void close() { socket_.close(); }

 private:
  transport::StreamSocket socket_;
  std::array<std::byte, wire::kPulseBytes> message_{};
  size_t num_sent_ = wire::kPulseBytes;  // bytes of `message_` that have been sent
};

// The caller never has start() and stop() run at the same time.
class Pulse {
 public:
  explicit Pulse(const std::atomic<uint64_t>& counter) : counter_(counter) {}
  ~Pulse() { stop(); }

  // Starts to send on a connected socket, plain or encrypted; a running pulse is stopped first.
  // Errors: kInvalidArgument, kSystem.
  Status start(transport::StreamSocket socket);
  // Joins the thread and closes the socket; returns within one send.
  void stop();

 private:
  void run();

  const std::atomic<uint64_t>& counter_;
  PulseSender sender_{transport::StreamSocket()};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace dflash::worker
