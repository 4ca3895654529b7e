// Wakes workers for a device that publishes to their rings, because a device's store wakes nobody
// who sleeps on a futex. A thread of its own looks at the heads from construction to destruction
// and takes up a core meanwhile, unless it naps.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "transport/ring_lender.h"

namespace dflash::transport {

class RingBell {
 public:
  // `nap_ns` is slept between two looks. With 0 there is no nap, which wants a core that nobody
  // else needs.
  RingBell(std::vector<RingView> rings, int64_t nap_ns);
  ~RingBell();
  RingBell(const RingBell&) = delete;
  RingBell& operator=(const RingBell&) = delete;

 private:
  void watch(int64_t nap_ns);

  std::vector<RingView> rings_;
  std::atomic<bool> is_over_ = false;
  std::thread thread_;
};

}  // namespace dflash::transport
