// An emulated link, in which each direction has a serialisation rate, a delay and a jitter of its
// own. Outgoing messages wait in their slots, incoming ones in theirs; the credit rule keeps both
// untouched meanwhile.
// SPDX-License-Identifier: Apache-2.0
#include <random>
#include <string>

#include "transport/faulty/faulty.h"
#include "transport/faulty/held_queue.h"

namespace dflash::transport {
namespace {

class EmulatedLink {
 public:
  EmulatedLink(const Emulation& emulation, uint64_t seed)
      : delay_ns_(emulation.delay_ms * 1e6),
        jitter_ns_(emulation.jitter_ms * 1e6),
        ns_per_byte_(emulation.mbit_s > 0 ? 8e3 / emulation.mbit_s : 0),
        random_(seed) {}

  // Returns when a message that is handed over now will be at the other end.
  int64_t due_ns(int64_t now, size_t bytes) {
    busy_until_ns_ = std::max(busy_until_ns_, now) +
                     static_cast<int64_t>(ns_per_byte_ * static_cast<double>(bytes));
    return busy_until_ns_ + static_cast<int64_t>(delay_ns_ + jitter_ns_ * unit_(random_));
  }

 private:
  double delay_ns_, jitter_ns_, ns_per_byte_;
  int64_t busy_until_ns_ = 0;
  std::mt19937_64 random_;
  std::uniform_real_distribution<double> unit_{0.0, 1.0};
};

class EmulatedChannel final : public Channel {
 public:
  EmulatedChannel(std::unique_ptr<Channel> inner, const Emulation& emulation)
      : inner_(std::move(inner)),
        out_(emulation, emulation.seed),
        in_(emulation, emulation.seed + 1) {}

  const SlotGeometry& geometry() const override { return inner_->geometry(); }
  const char* kind() const override { return inner_->kind(); }
  std::span<std::byte> outgoing(uint32_t slot) override { return inner_->outgoing(slot); }

  Status publish(uint32_t slot, size_t bytes) override {
    const bool fits = slot < geometry().num_slots && bytes <= inner_->outgoing(slot).size();
    if (!fits) return inner_->publish(slot, bytes);  // which refuses it
    if (failure_) return *failure_;
    if (sends_.num_held() >= geometry().num_slots) {
      return Error{ErrorCode::kInvalidArgument, std::string(kind()) + " channel: publish in slot " +
                                                    std::to_string(slot) + " while all " +
                                                    std::to_string(geometry().num_slots) +
                                                    " slots are under way; each is at most once"};
    }
    const int64_t now = now_ns();
    const int64_t due = out_.due_ns(now, bytes);
    if (sends_.is_empty() && due <= now) return inner_->publish(slot, bytes);
    sends_.push(due, {slot, bytes});
    return ok();
  }

  Result<std::optional<Arrival>> poll() override {
    release_sends(now_ns());
    // At most one reply per slot is under way, so that a peer which sends more is left waiting.
    while (!failure_ && arrivals_.num_held() < geometry().num_slots) {
      auto polled = inner_->poll();
      if (!polled.ok()) {
        failure_ = std::move(polled).error();
      } else if (!polled.value().has_value()) {
        break;
      } else {
        arrivals_.push(in_.due_ns(now_ns(), polled.value()->bytes.size()), *polled.value());
      }
    }
    if (auto arrival = arrivals_.take_due(now_ns())) return arrival;
    if (failure_ && arrivals_.is_empty()) return *failure_;
    return std::optional<Arrival>();
  }

  WakeSource arm(SleepKind kind) override { return inner_->arm(kind); }
  void disarm() override { inner_->disarm(); }
  int64_t next_event_ns() const override {
    return std::min({inner_->next_event_ns(), sends_.next_due_ns(), arrivals_.next_due_ns()});
  }

 private:
  void release_sends(int64_t now) {
    while (!failure_) {
      const auto send = sends_.take_due(now);
      if (!send) return;
      if (auto published = inner_->publish(send->slot, send->bytes); !published.ok())
        failure_ = std::move(published).error();
    }
  }

  std::unique_ptr<Channel> inner_;
  EmulatedLink out_, in_;
  HeldQueue<HeldSend> sends_;
  HeldQueue<Arrival> arrivals_;
  std::optional<Error> failure_;  // the inner channel's; it is told after what arrived before it
};

}  // namespace

std::unique_ptr<Channel> make_emulated(std::unique_ptr<Channel> inner, const Emulation& emulation) {
  return std::make_unique<EmulatedChannel>(std::move(inner), emulation);
}

}  // namespace dflash::transport
