// What only a byte stream can do wrong: half messages, bad prefixes, pieces of any size, full
// buffers.
// SPDX-License-Identifier: Apache-2.0
#include "transport/stream/stream.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "failed.h"
#include "transport/channel_kinds.h"
#include "transport/stream/assembler.h"

namespace dflash::transport {
namespace {

using namespace testing;

constexpr SlotGeometry kSmall{4, 1024, 2048};

std::vector<std::byte> prefix_of(uint32_t slot, uint32_t zero, uint64_t bytes) {
  std::vector<std::byte> prefix(kStreamPrefixBytes);
  std::memcpy(&prefix[0], &slot, 4);
  std::memcpy(&prefix[4], &zero, 4);
  std::memcpy(&prefix[8], &bytes, 8);
  return prefix;
}

// The host's channel and the bare socket of its peer.
struct BarePeer {
  OwnedFd socket;
  std::unique_ptr<Channel> host;

  BarePeer() {
    auto ends = unix_sockets();
    socket = std::move(ends.second);
    host = take(make_stream_channel(Side::kHost, kSmall, std::move(ends.first), {}));
  }
  void send(std::span<const std::byte> bytes) {
    REQUIRE(::send(socket.get(), bytes.data(), bytes.size(), 0) ==
            static_cast<ssize_t>(bytes.size()));
  }
};

TEST_CASE("a prefix out of range is a protocol error and stays one") {
  struct Case {
    const char* named;
    std::vector<std::byte> prefix;
  };
  const Case cases[] = {
      {"slot is 4",                      prefix_of(4,   0, 1)    },
      {"slot is 4294967295",             prefix_of(~0u, 0, 1)    },
      {"reserved field is 1",            prefix_of(0,   1, 1)    },
      {"length is 2049",                 prefix_of(0,   0, 2049) },
      {"length is 18446744073709551615", prefix_of(0,   0, ~0ull)},
  };
  for (const Case& hostile : cases) {
    BarePeer peer;
    peer.send(hostile.prefix);
    peer.send(prefix_of(0, 0, 0));  // a good one after it does not help
    for (int again = 0; again < 2; ++again) {
      const Error error = receive_error(*peer.host);
      CHECK(error.code == ErrorCode::kProtocol);
      CHECK_MESSAGE(error.message.find(hostile.named) != std::string::npos, error.message);
    }
  }
}

TEST_CASE("a message cut off by a close is a lost worker, wherever it was cut") {
  for (const size_t cut : {1u, 15u, 16u, 17u, 115u}) {
    BarePeer peer;
    auto bytes = prefix_of(1, 0, 100);
    bytes.resize(cut);
    peer.send(bytes);
    CHECK(!take(peer.host->poll()).has_value());
    peer.socket.close();
    const Error error = receive_error(*peer.host);
    CHECK(error == Failed(ErrorCode::kWorkerLost, "in the middle of a message"));
  }
}

TEST_CASE("messages arrive whole when they come byte by byte") {
  BarePeer peer;
  auto bytes = prefix_of(3, 0, 5);
  for (int i = 0; i < 5; ++i) bytes.push_back(static_cast<std::byte>(i));
  for (size_t i = 0; i + 1 < bytes.size(); ++i) {
    peer.send(std::span(bytes).subspan(i, 1));
    CHECK(!take(peer.host->poll()).has_value());
  }
  peer.send(std::span(bytes).last(1));
  const Arrival arrival = receive(*peer.host);
  CHECK(arrival.slot == 3);
  CHECK(std::memcmp(arrival.bytes.data(), bytes.data() + 16, 5) == 0);
}

TEST_CASE("the assembler rebuilds any message sequence from pieces of any size") {
  std::mt19937 engine(3);
  const auto random = [&] { return static_cast<uint32_t>(engine()); };
  constexpr uint64_t kSlotBytes = 40'000;
  for (int round = 0; round < 50; ++round) {
    std::vector<std::byte> sent;
    std::vector<std::pair<uint32_t, size_t>> messages;
    for (int i = 0; i < 20; ++i) {
      const uint32_t slot = random() % 8;
      const size_t bytes = random() % 3 == 0 ? random() % (kSlotBytes + 1) : random() % 100;
      messages.emplace_back(slot, bytes);
      const auto prefix = prefix_of(slot, 0, bytes);
      sent.insert(sent.end(), prefix.begin(), prefix.end());
      sent.resize(sent.size() + bytes);
      fill(std::span(sent).last(bytes), static_cast<uint64_t>(i));
    }
    std::vector<std::byte> slots(8 * kSlotBytes);
    Assembler assembler(slots, 8, kSlotBytes);
    size_t given = 0, seen = 0;
    while (seen < messages.size()) {
      const auto next = take(assembler.next());
      if (next) {
        CHECK(next->slot == messages[seen].first);
        CHECK(next->bytes.size() == messages[seen].second);
        CHECK(is_filled_with(next->bytes, seen++));
        continue;
      }
      REQUIRE(given < sent.size());
      const Assembler::Room room = assembler.room();
      size_t piece = std::min<size_t>(
          sent.size() - given, random() % 2 == 0 ? 1 + random() % 30 : 1 + random() % 60'000);
      piece = std::min(piece, room.slot.size() + room.staging.size());
      const size_t into_slot = std::min(piece, room.slot.size());
      if (into_slot > 0) std::memcpy(room.slot.data(), &sent[given], into_slot);
      if (piece > into_slot)
        std::memcpy(room.staging.data(), &sent[given + into_slot], piece - into_slot);
      assembler.filled(piece);
      given += piece;
    }
    CHECK(given == sent.size());
    CHECK(!assembler.is_mid_message());
  }
}

TEST_CASE("messages queued behind a full socket arrive in order and unharmed") {
  constexpr SlotGeometry kWide{8, 300'032, 64};
  for (const bool is_tcp : {false, true}) {
    // Far below one message. TCP over buffers below its segment size would wait for its own timers.
    const int buffer_bytes = is_tcp ? 128 << 10 : 4096;
    const StreamOptions tight{buffer_bytes, buffer_bytes, 0};
    ChannelPair pair = stream_pair(kWide, is_tcp ? tcp_sockets() : unix_sockets(), tight);
    for (uint32_t slot = 0; slot < 8; ++slot) {
      fill(pair.host->outgoing(slot), slot);
      REQUIRE(pair.host->publish(slot, kWide.request_bytes).ok());
    }
    // its slot is still under way
    CHECK(pair.host->publish(0, 1).error().code == ErrorCode::kInvalidArgument);
    std::thread sender([&] {
      CHECK(receive(*pair.host).slot == 5);  // waiting for the reply moves the requests
    });
    for (uint32_t slot = 0; slot < 8; ++slot) {
      const Arrival arrival = receive(*pair.worker);
      CHECK(arrival.slot == slot);
      CHECK(is_filled_with(arrival.bytes, slot));
    }
    REQUIRE(pair.worker->publish(5, 64).ok());
    sender.join();
  }
}

TEST_CASE("options reach the socket and a descriptor that is no socket is refused") {
  auto ends = tcp_sockets();
  const int fd = ends.first.get();
  StreamOptions options;
  options.user_timeout_ms = 1234;
  const auto channel =
      take(make_stream_channel(Side::kHost, kSmall, std::move(ends.first), options));
  int value = 0;
  socklen_t length = sizeof value;
  REQUIRE(::getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &value, &length) == 0);
  CHECK(value == 1234);
  REQUIRE(::getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &value, &length) == 0);
  CHECK(value != 0);
  CHECK((::fcntl(fd, F_GETFL) & O_NONBLOCK) != 0);
  CHECK(
      make_stream_channel(Side::kHost, kSmall, OwnedFd(::open("/dev/null", O_RDWR | O_CLOEXEC)), {})
          .error()
          .code == ErrorCode::kSystem);
}

}  // namespace
}  // namespace dflash::transport
