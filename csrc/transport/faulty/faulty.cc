// One planned fault: the n-th message at one point fails, waits, loses bytes, gets a flipped bit or
// vanishes.
// SPDX-License-Identifier: Apache-2.0
#include "transport/faulty/faulty.h"

#include <random>
#include <string>
#include <vector>

#include "transport/faulty/held_queue.h"

namespace dflash::transport {
namespace {

class FaultyChannel final : public Channel {
 public:
  FaultyChannel(std::unique_ptr<Channel> inner, const Fault& fault)
      : inner_(std::move(inner)), fault_(fault), random_(fault.seed) {}

  const SlotGeometry& geometry() const override { return inner_->geometry(); }
  const char* kind() const override { return inner_->kind(); }
  std::span<std::byte> outgoing(uint32_t slot) override { return inner_->outgoing(slot); }

  Status publish(uint32_t slot, size_t bytes) override {
    const bool fits = slot < geometry().num_slots && bytes <= inner_->outgoing(slot).size();
    if (!fits) return inner_->publish(slot, bytes);  // which refuses it; it does not count
    if (failure_) return *failure_;
    switch (next_fault(FaultPoint::kPublish)) {
      case FaultKind::kFail:     return fail();
      case FaultKind::kDrop:     return ok();
      case FaultKind::kTruncate: bytes = truncated(bytes); break;
      case FaultKind::kCorrupt:  flip_one_bit(inner_->outgoing(slot).first(bytes)); break;
      case FaultKind::kDelay:    sends_.push(now_ns() + delay_ns(), {slot, bytes}); return ok();
      case FaultKind::kNone:     break;
    }
    if (sends_.is_empty()) return inner_->publish(slot, bytes);
    sends_.push(0, {slot, bytes});  // it is due with the delayed one before it
    return ok();
  }

  Result<std::optional<Arrival>> poll() override {
    if (failure_) return *failure_;
    while (const auto send = sends_.take_due(now_ns())) {
      if (auto published = inner_->publish(send->slot, send->bytes); !published.ok())
        return keep(std::move(published).error());
    }
    for (;;) {
      if (auto arrival = arrivals_.take_due(now_ns())) return arrival;
      if (arrivals_.num_held() >= geometry().num_slots) return std::optional<Arrival>();
      auto polled = inner_->poll();
      if (!polled.ok()) {
        // The error is told after what arrived before it.
        if (!arrivals_.is_empty()) return std::optional<Arrival>();
        return keep(std::move(polled).error());
      }
      if (!polled.value().has_value()) return polled;
      const auto delivered = meet(*polled.value());
      if (!delivered.ok() || delivered.value().has_value()) return delivered;
    }
  }

  WakeSource arm(SleepKind kind) override { return inner_->arm(kind); }
  void disarm() override { inner_->disarm(); }
  int64_t next_event_ns() const override {
    return std::min({inner_->next_event_ns(), sends_.next_due_ns(), arrivals_.next_due_ns()});
  }

 private:
  // Applies the fault to an arrival: it is delivered now, or nothing is yet (dropped or held).
  Result<std::optional<Arrival>> meet(Arrival arrival) {
    int64_t due_ns = 0;
    switch (next_fault(FaultPoint::kPoll)) {
      case FaultKind::kFail: return fail();
      case FaultKind::kDrop: return std::optional<Arrival>();
      case FaultKind::kTruncate:
        arrival.bytes = arrival.bytes.first(truncated(arrival.bytes.size()));
        break;
      case FaultKind::kCorrupt:
        corrupted_.assign(arrival.bytes.begin(), arrival.bytes.end());
        flip_one_bit(corrupted_);
        arrival.bytes = corrupted_;
        break;
      case FaultKind::kDelay: due_ns = now_ns() + delay_ns(); break;
      case FaultKind::kNone:  break;
    }
    if (arrivals_.is_empty() && due_ns == 0) return std::optional<Arrival>(arrival);
    arrivals_.push(due_ns, arrival);
    return std::optional<Arrival>();
  }

  FaultKind next_fault(FaultPoint point) {
    if (point != fault_.point) return FaultKind::kNone;
    return ++num_operations_ == fault_.nth ? fault_.kind : FaultKind::kNone;
  }
  Error fail() {
    return keep({ErrorCode::kWorkerLost, std::string(kind()) +
                                             " channel: injected failure of operation " +
                                             std::to_string(fault_.nth)});
  }
  Error keep(Error error) {
    failure_ = std::move(error);
    return *failure_;
  }
  int64_t delay_ns() const { return static_cast<int64_t>(fault_.delay_ms * 1e6); }
  size_t truncated(size_t bytes) { return bytes == 0 ? 0 : random_() % bytes; }
  void flip_one_bit(std::span<std::byte> bytes) {
    if (bytes.empty()) return;
    const uint64_t bit = random_() % (8 * bytes.size());
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  }

  std::unique_ptr<Channel> inner_;
  Fault fault_;
  std::mt19937_64 random_;
  uint64_t num_operations_ = 0;
  HeldQueue<HeldSend> sends_;
  HeldQueue<Arrival> arrivals_;
  // The one corrupted message. It is a copy, because only the peer may write the peer's memory.
  std::vector<std::byte> corrupted_;
  std::optional<Error> failure_;
};

}  // namespace

std::unique_ptr<Channel> make_faulty(std::unique_ptr<Channel> inner, const Fault& fault) {
  return std::make_unique<FaultyChannel>(std::move(inner), fault);
}

}  // namespace dflash::transport
