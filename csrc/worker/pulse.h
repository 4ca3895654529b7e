// The worker's heartbeat: a C++ thread that reports the progress counter, so that a stuck work loop
// is seen as frozen and a busy Python interpreter is not. Knows nothing of sessions or channels.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <span>
#include <thread>

#include "base/owned_fd.h"
#include "base/result.h"

namespace dflash::worker {

// One pulse on the wire, little-endian: magic u32, version u32, progress counter u64.
inline constexpr uint32_t kPulseMagic = 0x534c5550;  // "PULS"
inline constexpr uint32_t kPulseVersion = 1;
inline constexpr size_t kPulseBytes = 16;
// a tenth of the shortest stall limit anyone sensibly sets
inline constexpr int kPulsePeriodMs = 100;

void encode_pulse(uint64_t counter, std::span<std::byte, kPulseBytes> out);

class Pulse {
 public:
  explicit Pulse(const std::atomic<uint64_t>& counter) : counter_(counter) {}
  ~Pulse() { stop(); }

  // Replaces a running pulse. Takes a connected socket. Errors: kSystem.
  Status start(OwnedFd socket);
  // Joins the thread and closes the socket; returns within one send.
  void stop();

 private:
  void run();

  const std::atomic<uint64_t>& counter_;
  OwnedFd socket_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace dflash::worker
