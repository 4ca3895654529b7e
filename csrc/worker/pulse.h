// The worker's heartbeat: a C++ thread that reports the progress counter. A stuck work loop is
// therefore seen as frozen, and a busy Python interpreter is not. The bytes are those of
// wire/pulse.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/result.h"
#include "transport/secure/stream_socket.h"

namespace dflash::worker {

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
  transport::StreamSocket socket_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace dflash::worker
