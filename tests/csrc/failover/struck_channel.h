// The worker's end of a path, which strikes its own process with a signal at a moment that the host
// ordered: no hook in the product, and a moment that no signal from outside could hit as surely.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>

#include "base/owned_fd.h"
#include "transport/channel.h"

namespace dflash::failover {

// The moments of a call at which a worker is struck. The first and the last are the host's to meet,
// the others the worker's own.
enum class Moment : uint32_t {
  kIdle,         // before the call is submitted
  kOnItsWay,     // the request lies in the channel, and nothing of it is used
  kComputing,    // the request is taken and its reply not complete
  kHalfWritten,  // half of the reply is written
  kUnread,       // all of the reply is written, and maybe read
  kAnyTime,      // any time after the call was submitted
};
inline constexpr uint32_t kNumMoments = 6;
const char* moment_name(Moment moment);

// What the host orders, in memory that it shares with the worker's process.
struct Orders {
  static constexpr uint32_t kNone = kNumMoments;
  std::atomic<uint32_t> moment{kNone};  // stored with release after the fields below
  std::atomic<uint32_t> looks{0};       // while computing, at the channel before it is time
  std::atomic<int> signal{0};
  std::atomic<uint32_t> num_obeyed{0};

  void give(Moment when, uint32_t num_looks, int sent) {
    looks.store(num_looks, std::memory_order_relaxed);
    signal.store(sent, std::memory_order_relaxed);
    moment.store(static_cast<uint32_t>(when), std::memory_order_release);
  }
  void withdraw() { moment.store(kNone, std::memory_order_release); }
};

// `orders` outlives the channel. `socket` is a duplicate of the channel's own, closed where it has
// none.
std::unique_ptr<transport::Channel> make_struck(std::unique_ptr<transport::Channel> inner,
                                                Orders& orders, OwnedFd socket);

}  // namespace dflash::failover
