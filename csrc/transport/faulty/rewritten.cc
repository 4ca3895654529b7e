// A channel whose arrivals are changed in copies, one per slot, because only the peer may write the
// peer's memory.
// SPDX-License-Identifier: Apache-2.0
#include <utility>
#include <vector>

#include "transport/faulty/faulty.h"

namespace dflash::transport {
namespace {

class RewrittenChannel final : public Channel {
 public:
  RewrittenChannel(std::unique_ptr<Channel> inner, RewriteReply rewrite)
      : inner_(std::move(inner)),
        rewrite_(std::move(rewrite)),
        copies_(inner_->geometry().num_slots) {}

  const SlotGeometry& geometry() const override { return inner_->geometry(); }
  const char* kind() const override { return inner_->kind(); }
  std::span<std::byte> outgoing(uint32_t slot) override { return inner_->outgoing(slot); }
  Status publish(uint32_t slot, size_t bytes) override { return inner_->publish(slot, bytes); }
  Result<std::optional<Arrival>> poll() override {
    auto polled = inner_->poll();
    if (!polled.ok() || !polled.value().has_value()) return polled;
    const Arrival arrival = *polled.value();
    std::vector<std::byte>& copy = copies_[arrival.slot];
    copy.assign(arrival.bytes.begin(), arrival.bytes.end());
    rewrite_(copy);
    return std::optional<Arrival>(Arrival{arrival.slot, copy});
  }
  WakeSource arm(SleepKind kind) override { return inner_->arm(kind); }
  void disarm() override { inner_->disarm(); }
  int64_t next_event_ns() const override { return inner_->next_event_ns(); }

 private:
  const std::unique_ptr<Channel> inner_;
  const RewriteReply rewrite_;
  std::vector<std::vector<std::byte>> copies_;  // [num_slots]
};

}  // namespace

std::unique_ptr<Channel> make_rewritten(std::unique_ptr<Channel> inner, RewriteReply rewrite) {
  return std::make_unique<RewrittenChannel>(std::move(inner), std::move(rewrite));
}

}  // namespace dflash::transport
