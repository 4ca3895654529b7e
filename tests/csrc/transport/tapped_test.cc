// A tap copies whole exchanges, and ends a burst by what was sent, whatever becomes of the replies.
// SPDX-License-Identifier: Apache-2.0
#include "transport/tapped.h"

#include <doctest/doctest.h>
#include <poll.h>

#include <vector>

#include "transport/channel_kinds.h"

namespace dflash::transport {
namespace {

using namespace testing;

constexpr SlotGeometry kGeometry{8, 256, 256};
constexpr uint64_t kRoom = 1 << 20;

struct Tapped {
  Tapped() {
    auto made = Tap::create();
    REQUIRE(made.ok());
    tap = std::move(made).value();
    ChannelPair pair = Loopback::make(kGeometry);
    host = make_tapped(std::move(pair.host), tap);
    worker = std::move(pair.worker);
  }
  void ask(uint32_t slot, size_t bytes = 64) const {
    std::fill_n(host->outgoing(slot).begin(), bytes, std::byte{static_cast<uint8_t>(slot)});
    REQUIRE(host->publish(slot, bytes).ok());
    REQUIRE(take(worker->poll()).has_value());
  }
  void answer(uint32_t slot) const {
    std::fill_n(worker->outgoing(slot).begin(), 64, std::byte{static_cast<uint8_t>(100 + slot)});
    REQUIRE(worker->publish(slot, 64).ok());
    REQUIRE(take(host->poll()).has_value());
  }
  bool is_readable() const {
    pollfd one{tap->fd(), POLLIN, 0};
    return ::poll(&one, 1, 0) == 1;
  }

  std::shared_ptr<Tap> tap;
  std::unique_ptr<Channel> host, worker;
};

TEST_CASE("what was asked for is copied once its reply is there, and nothing else") {
  const Tapped ends;
  ends.tap->arm(1, 2, kRoom);
  for (uint32_t slot = 0; slot < 4; ++slot) ends.ask(slot);
  for (uint32_t slot = 0; slot < 4; ++slot) ends.answer(slot);
  const auto copies = ends.tap->take();
  REQUIRE(copies.size() == 2);
  for (uint8_t at = 0; at < 2; ++at) {
    CHECK(copies[at].request == std::vector<std::byte>(64, std::byte(1 + at)));
    CHECK(copies[at].reply == std::vector<std::byte>(64, std::byte(101 + at)));
  }
  CHECK_FALSE(ends.is_readable());
}

TEST_CASE("a burst is spent when its last request is sent, though no reply ever comes") {
  const Tapped ends;
  ends.tap->arm(0, 2, kRoom);
  ends.ask(0);
  CHECK_FALSE(ends.tap->is_spent());
  CHECK_FALSE(ends.is_readable());
  ends.ask(1);
  CHECK(ends.tap->is_spent());
  // Whoever sleeps on the tap is woken, to ask for the next burst.
  CHECK(ends.is_readable());
  CHECK(ends.tap->take().empty());
  CHECK_FALSE(ends.is_readable());
  ends.tap->arm(0, 1, kRoom);
  CHECK_FALSE(ends.tap->is_spent());
  ends.ask(2);
  ends.answer(2);
  CHECK(ends.tap->take().size() == 1);
  // What belongs to an earlier burst is still a whole exchange when its reply comes late.
  ends.answer(0);
  const auto late = ends.tap->take();
  REQUIRE(late.size() == 1);
  CHECK(late[0].request == std::vector<std::byte>(64, std::byte{0}));
}

TEST_CASE("copies that nobody has taken outlive the next burst's beginning") {
  const Tapped ends;
  ends.tap->arm(0, 1, kRoom);
  ends.ask(0);
  ends.answer(0);
  ends.tap->arm(0, 1, kRoom);
  CHECK(ends.tap->take().size() == 1);
}

TEST_CASE(
    "the first request without room ends a burst, and one that no burst has room for does not") {
  const Tapped ends;
  ends.tap->arm(0, 8, 100);
  ends.ask(0, 128);
  CHECK_FALSE(ends.tap->is_spent());
  ends.ask(1, 64);
  CHECK_FALSE(ends.tap->is_spent());
  ends.ask(2, 64);
  CHECK(ends.tap->is_spent());
  CHECK(ends.is_readable());
  for (uint32_t slot = 0; slot < 3; ++slot) ends.answer(slot);
  const auto copies = ends.tap->take();
  REQUIRE(copies.size() == 1);
  CHECK(copies[0].request == std::vector<std::byte>(64, std::byte{1}));
}

}  // namespace
}  // namespace dflash::transport
