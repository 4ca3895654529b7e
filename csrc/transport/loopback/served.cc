// Everything but publish() and poll() is the host end's own.
// SPDX-License-Identifier: Apache-2.0
#include "transport/loopback/loopback.h"

#include <utility>

namespace dflash::transport {
namespace {

class ServedChannel final : public Channel {
 public:
  ServedChannel(ChannelPair ends, ServeOne serve_one)
      : host_(std::move(ends.host)),
        worker_(std::move(ends.worker)),
        serve_one_(std::move(serve_one)) {}

  const SlotGeometry& geometry() const override { return host_->geometry(); }
  const char* kind() const override { return host_->kind(); }
  std::span<std::byte> outgoing(uint32_t slot) override { return host_->outgoing(slot); }
  Status publish(uint32_t slot, size_t bytes) override {
    DFLASH_TRY(host_->publish(slot, bytes));
    ++num_unanswered_;
    return ok();
  }
  Result<std::optional<Arrival>> poll() override {
    if (num_unanswered_ > 0) {
      auto served = serve_one_(*worker_);
      if (!served.ok()) return std::move(served).error();
      if (served.value()) --num_unanswered_;
    }
    return host_->poll();
  }
  WakeSource arm(SleepKind kind) override { return host_->arm(kind); }
  void disarm() override { host_->disarm(); }
  int64_t next_event_ns() const override { return host_->next_event_ns(); }

 private:
  const std::unique_ptr<Channel> host_, worker_;
  const ServeOne serve_one_;
  uint32_t num_unanswered_ = 0;
};

}  // namespace

std::unique_ptr<Channel> make_served(ChannelPair ends, ServeOne serve_one) {
  return std::make_unique<ServedChannel>(std::move(ends), std::move(serve_one));
}

}  // namespace dflash::transport
