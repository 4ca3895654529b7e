// A decorator of the host's end of a channel that copies some exchanges, request and reply, for
// somebody who computes them again elsewhere. It changes nothing on the way. While nobody has asked
// for copies it costs one load per message.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/owned_fd.h"
#include "transport/channel.h"

namespace dflash::transport {

// One exchange as it crossed the channel.
struct TappedExchange {
  std::vector<std::byte> request, reply;
};

// Where the copies lie until somebody takes them. Several channels may share one. Any thread.
class Tap {
 public:
  // Errors: kSystem where the system has no descriptor left.
  static Result<std::shared_ptr<Tap>> create();

  // Has the next `num_exchanges` exchanges of its channels copied, after `num_skipped` that are
  // not. Their requests may have up to `max_bytes` together: the first that would go beyond ends
  // the burst, and one that alone has more is left out. A request counts when it is sent, whether
  // its reply ever comes or not. What was copied before stays until it is taken.
  void arm(uint32_t num_skipped, uint32_t num_exchanges, uint64_t max_bytes);
  // The copies whose replies have come, oldest first, which the caller has from now on.
  std::vector<TappedExchange> take();
  // Says that the last request of a burst was sent, so that nothing more is copied until the next
  // `arm`. Replies to it may still come, and are copied.
  bool is_spent() const { return !is_armed(); }
  // Readable while there are copies to take, and when a burst was spent; the tap's own.
  int fd() const { return fd_.get(); }

 private:
  friend class TappedChannel;
  explicit Tap(OwnedFd fd) : fd_(std::move(fd)) {}
  bool is_armed() const { return num_wanted_.load(std::memory_order_relaxed) != 0; }
  // Returns whether this request is one to copy.
  bool wants(uint64_t num_bytes);
  void put(TappedExchange exchange);
  void ring();

  const OwnedFd fd_;
  std::atomic<uint32_t> num_wanted_{0};  // a hint outside of mutex_, which guards the rest
  std::mutex mutex_;
  uint32_t num_skipped_ = 0;
  uint64_t max_bytes_ = 0, room_bytes_ = 0;
  std::vector<TappedExchange> taken_;
};

std::unique_ptr<Channel> make_tapped(std::unique_ptr<Channel> inner, std::shared_ptr<Tap> tap);

}  // namespace dflash::transport
