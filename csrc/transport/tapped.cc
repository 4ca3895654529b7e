// Requests are copied when they are published, and wait beside their slot for the reply.
// SPDX-License-Identifier: Apache-2.0
#include "transport/tapped.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <utility>

#include "base/result.h"
#include "transport/ring_lender.h"

namespace dflash::transport {

Result<std::shared_ptr<Tap>> Tap::create() {
  OwnedFd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd.is_open()) return system_error("the bell of a tap could not be made", errno);
  return std::shared_ptr<Tap>(new Tap(std::move(fd)));
}

void Tap::arm(uint32_t num_skipped, uint32_t num_exchanges, uint64_t max_bytes) {
  const std::lock_guard lock(mutex_);
  num_skipped_ = num_skipped;
  max_bytes_ = room_bytes_ = max_bytes;
  num_wanted_.store(num_exchanges, std::memory_order_relaxed);
}

bool Tap::wants(uint64_t num_bytes) {
  const std::lock_guard lock(mutex_);
  const uint32_t wanted = num_wanted_.load(std::memory_order_relaxed);
  if (wanted == 0) return false;
  if (num_skipped_ != 0) {
    --num_skipped_;
    return false;
  }
  // A request that no burst has room for ends none, or smaller ones would not get their turn.
  if (num_bytes > max_bytes_) return false;
  const bool fits = num_bytes <= room_bytes_;
  if (fits) room_bytes_ -= num_bytes;
  num_wanted_.store(fits ? wanted - 1 : 0, std::memory_order_relaxed);
  if (!fits || wanted == 1) ring();
  return fits;
}

void Tap::put(TappedExchange exchange) {
  {
    const std::lock_guard lock(mutex_);
    taken_.push_back(std::move(exchange));
  }
  ring();
}

void Tap::ring() {
  const uint64_t one = 1;
  // A counter that is full keeps the descriptor readable, which is all that is asked of it.
  static_cast<void>(!::write(fd_.get(), &one, sizeof one));
}

std::vector<TappedExchange> Tap::take() {
  uint64_t count = 0;
  const std::lock_guard lock(mutex_);
  static_cast<void>(!::read(fd_.get(), &count, sizeof count));
  return std::exchange(taken_, {});
}

class TappedChannel : public Channel {
 public:
  TappedChannel(std::unique_ptr<Channel> inner, std::shared_ptr<Tap> tap)
      : inner_(std::move(inner)), tap_(std::move(tap)), requests_(inner_->geometry().num_slots) {}

  const SlotGeometry& geometry() const override { return inner_->geometry(); }
  const char* kind() const override { return inner_->kind(); }
  std::span<std::byte> outgoing(uint32_t slot) override { return inner_->outgoing(slot); }
  Status publish(uint32_t slot, size_t bytes) override {
    if (tap_->is_armed() && slot < requests_.size()) copy_request(slot, bytes);
    return inner_->publish(slot, bytes);
  }
  Result<std::optional<Arrival>> poll() override {
    auto polled = inner_->poll();
    if (num_copied_ == 0 || !polled.ok() || !polled.value().has_value()) return polled;
    const Arrival& arrival = *polled.value();
    std::optional<std::vector<std::byte>>& request = requests_[arrival.slot];
    if (request) {
      --num_copied_;
      tap_->put({
          std::move(*request), {arrival.bytes.begin(), arrival.bytes.end()}
      });
      request.reset();
    }
    return polled;
  }
  WakeSource arm(SleepKind kind) override { return inner_->arm(kind); }
  void disarm() override { inner_->disarm(); }
  int64_t next_event_ns() const override { return inner_->next_event_ns(); }

 private:
  void copy_request(uint32_t slot, size_t bytes) {
    const auto source = inner_->outgoing(slot);
    if (bytes > source.size() || !tap_->wants(bytes)) return;
    num_copied_ += requests_[slot] ? 0 : 1;
    requests_[slot].emplace(source.begin(), source.begin() + static_cast<std::ptrdiff_t>(bytes));
  }

  const std::unique_ptr<Channel> inner_;
  const std::shared_ptr<Tap> tap_;
  uint32_t num_copied_ = 0;  // requests that wait for their reply
  std::vector<std::optional<std::vector<std::byte>>> requests_;  // [num_slots]
};

// A tapped channel that lends the ring under it.
class TappedRing final : public TappedChannel, public RingLender {
 public:
  TappedRing(std::unique_ptr<Channel> inner, RingLender& lender, std::shared_ptr<Tap> tap)
      : TappedChannel(std::move(inner), std::move(tap)), lender_(lender) {}

  RingView ring() const override { return lender_.ring(); }
  void set_ring(uint32_t head, uint32_t tail) override { lender_.set_ring(head, tail); }

 private:
  RingLender& lender_;  // the channel within
};

std::unique_ptr<Channel> make_tapped(std::unique_ptr<Channel> inner, std::shared_ptr<Tap> tap) {
  if (RingLender* const lender = ring_lender(inner.get()))
    return std::make_unique<TappedRing>(std::move(inner), *lender, std::move(tap));
  return std::make_unique<TappedChannel>(std::move(inner), std::move(tap));
}

}  // namespace dflash::transport
