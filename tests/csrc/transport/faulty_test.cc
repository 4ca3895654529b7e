// The decorators: each planned fault happens at its message and nowhere else; emulated links keep
// order, delay and rate.
// SPDX-License-Identifier: Apache-2.0
#include "transport/faulty/faulty.h"

#include <doctest/doctest.h>

#include <bit>
#include <vector>

#include "transport/channel_kinds.h"

namespace dflash::transport {
namespace {

using namespace testing;

constexpr SlotGeometry kSmall{8, 256, 256};

ChannelPair with_fault(FaultKind kind, FaultPoint point, uint64_t nth, double delay_ms = 0) {
  ChannelPair pair = Loopback::make(kSmall);
  pair.host = make_faulty(std::move(pair.host), Fault{kind, point, nth, delay_ms, 3});
  return pair;
}

// Sends three messages through the faulty end in the direction of `point`; the receiver's view of
// each that arrived.
struct Seen {
  uint32_t slot;
  size_t bytes;
  int wrong_bits;
};
std::vector<Seen> send_three(const ChannelPair& pair, FaultPoint point) {
  Channel& sender = point == FaultPoint::kPublish ? *pair.host : *pair.worker;
  Channel& receiver = point == FaultPoint::kPublish ? *pair.worker : *pair.host;
  std::vector<Seen> seen;
  for (uint32_t slot = 0; slot < 3; ++slot) {
    const auto bytes = sender.outgoing(slot).first(100);
    std::fill(bytes.begin(), bytes.end(), std::byte{0x55});
    REQUIRE(sender.publish(slot, 100).ok());
    while (const auto arrival = take(receiver.poll())) {
      Seen one{arrival->slot, arrival->bytes.size(), 0};
      for (const std::byte byte : arrival->bytes)
        one.wrong_bits += std::popcount(std::to_integer<uint32_t>(byte ^ std::byte{0x55}));
      seen.push_back(one);
    }
  }
  return seen;
}

constexpr FaultPoint kPoints[] = {FaultPoint::kPublish, FaultPoint::kPoll};

TEST_CASE("no fault changes nothing") {
  for (const FaultPoint point : kPoints) {
    const auto seen = send_three(with_fault(FaultKind::kNone, point, 2), point);
    REQUIRE(seen.size() == 3);
    for (const Seen& one : seen) CHECK((one.bytes == 100 && one.wrong_bits == 0));
  }
}

TEST_CASE("a dropped message is the only one missing") {
  for (const FaultPoint point : kPoints) {
    const auto seen = send_three(with_fault(FaultKind::kDrop, point, 2), point);
    REQUIRE(seen.size() == 2);
    CHECK(seen[0].slot == 0);
    CHECK(seen[1].slot == 2);
  }
}

TEST_CASE("a truncated message is the only shorter one") {
  for (const FaultPoint point : kPoints) {
    const auto seen = send_three(with_fault(FaultKind::kTruncate, point, 2), point);
    REQUIRE(seen.size() == 3);
    CHECK(seen[0].bytes == 100);
    CHECK(seen[1].bytes < 100);
    CHECK(seen[2].bytes == 100);
  }
}

TEST_CASE("a corrupted message has exactly one wrong bit and its neighbours none") {
  for (const FaultPoint point : kPoints) {
    const auto seen = send_three(with_fault(FaultKind::kCorrupt, point, 2), point);
    REQUIRE(seen.size() == 3);
    CHECK(seen[0].wrong_bits == 0);
    CHECK(seen[1].wrong_bits == 1);
    CHECK(seen[2].wrong_bits == 0);
  }
}

TEST_CASE("a delayed message holds back those behind it and all come in order") {
  for (const FaultPoint point : kPoints) {
    const ChannelPair pair = with_fault(FaultKind::kDelay, point, 2, 30);
    const int64_t start = now_ns();
    const auto seen = send_three(pair, point);
    REQUIRE(seen.size() >= 1);
    // More only once the delay is over, which a busy machine may reach before the last poll.
    CHECK((seen.size() == 1 || now_ns() - start >= 30'000'000));
    for (uint32_t slot = static_cast<uint32_t>(seen.size()); slot < 3; ++slot) {
      WaitEntry entries[2];
      entries[0].channel = pair.host.get();
      entries[1].channel = pair.worker.get();
      wait_any(entries, Deadline::after_ms(10'000), 0);
      const WaitEntry& receiver = entries[point == FaultPoint::kPublish ? 1 : 0];
      REQUIRE(receiver.arrival.has_value());
      CHECK(receiver.arrival->slot == slot);
    }
    CHECK(now_ns() - start >= 30'000'000);
  }
}

TEST_CASE("a failed publish is a lost worker from then on") {
  const ChannelPair pair = with_fault(FaultKind::kFail, FaultPoint::kPublish, 2);
  CHECK(pair.host->publish(0, 1).ok());
  CHECK(pair.host->publish(1, 1).error().code == ErrorCode::kWorkerLost);
  CHECK(pair.host->publish(2, 1).error().code == ErrorCode::kWorkerLost);
  CHECK(pair.host->poll().error().code == ErrorCode::kWorkerLost);
}

TEST_CASE("a failed poll is a lost worker from then on") {
  const ChannelPair pair = with_fault(FaultKind::kFail, FaultPoint::kPoll, 2);
  REQUIRE(pair.worker->publish(0, 1).ok());
  REQUIRE(pair.worker->publish(1, 1).ok());
  CHECK(receive(*pair.host).slot == 0);
  CHECK(pair.host->poll().error().code == ErrorCode::kWorkerLost);
  CHECK(pair.host->publish(2, 1).error().code == ErrorCode::kWorkerLost);
}

TEST_CASE("an emulated delay is met in each direction, and a sleeping waiter notices") {
  ChannelPair pair = Loopback::make(kSmall);
  pair.host = make_emulated(std::move(pair.host), Emulation{10, 0, 0, 1});
  const int64_t start = now_ns();
  REQUIRE(pair.host->publish(4, 100).ok());
  CHECK(!take(pair.worker->poll()).has_value());
  CHECK(pair.host->next_event_ns() >= start + 10'000'000);
  // Both ends are in this thread: the host's wait is what lets the request out.
  WaitEntry entries[2];
  entries[0].channel = pair.host.get();
  entries[1].channel = pair.worker.get();
  wait_any(entries, Deadline::after_ms(10'000), 0);
  REQUIRE(entries[1].arrival.has_value());
  CHECK(now_ns() - start >= 10'000'000);
  REQUIRE(pair.worker->publish(4, 100).ok());
  CHECK(receive(*pair.host).slot == 4);
  CHECK(now_ns() - start >= 20'000'000);
}

TEST_CASE("an emulated rate serialises messages one after the other") {
  ChannelPair pair = Loopback::make({8, 1 << 16, 64});
  pair.host = make_emulated(std::move(pair.host), Emulation{0, 0, 100, 1});  // 64 KiB take 5.2 ms
  const int64_t start = now_ns();
  for (uint32_t slot = 0; slot < 4; ++slot) REQUIRE(pair.host->publish(slot, 1 << 16).ok());
  for (uint32_t slot = 0; slot < 4; ++slot) {
    WaitEntry entries[2];
    entries[0].channel = pair.host.get();
    entries[1].channel = pair.worker.get();
    wait_any(entries, Deadline::after_ms(10'000), 0);
    REQUIRE(entries[1].arrival.has_value());
    CHECK(entries[1].arrival->slot == slot);
    CHECK(now_ns() - start >= (slot + 1) * 5'242'000LL);
  }
}

TEST_CASE("jitter never reorders messages") {
  ChannelPair pair = Loopback::make(kSmall);
  pair.host = make_emulated(std::move(pair.host), Emulation{0, 3, 0, 9});
  for (uint32_t slot = 0; slot < 8; ++slot) REQUIRE(pair.worker->publish(slot, 1).ok());
  for (uint32_t slot = 0; slot < 8; ++slot) CHECK(receive(*pair.host).slot == slot);
}

TEST_CASE("an emulated link refuses what its inner channel would, and more sends than slots") {
  ChannelPair pair = Loopback::make(kSmall);
  pair.host = make_emulated(std::move(pair.host), Emulation{1000, 0, 0, 1});
  CHECK(pair.host->publish(8, 1).error().code == ErrorCode::kInvalidArgument);
  CHECK(pair.host->publish(0, 257).error().code == ErrorCode::kInvalidArgument);
  for (uint32_t slot = 0; slot < 8; ++slot) REQUIRE(pair.host->publish(slot, 1).ok());
  CHECK(pair.host->publish(0, 1).error().code == ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace dflash::transport
