// What is a fabric's own: strangers at its endpoints, peers that lie, handovers that are no
// handovers, and ends without a provider in common. All else is the conformance suite's.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#if __has_include(<rdma/fi_endpoint.h>)

#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "failed.h"
#include "transport/channel_kinds.h"
#include "transport/fabric/fabric_channel.h"

namespace dflash::transport {
namespace {

using namespace testing;

constexpr SlotGeometry kSmall{2, 256, 512};

// One end is a channel, the other a bare endpoint that may send what it likes.
struct LyingPeer {
  std::unique_ptr<Channel> channel;
  FabricEndpoint peer;
  OwnedFd companion;
  std::vector<std::byte> address;  // the channel's
  fi_context2 context{};

  // Sends without waiting for the completion of the former message's room, since what is sent never
  // changes.
  void send(size_t num_bytes, uint32_t slot) { send_from(peer, num_bytes, slot); }
  void send_from(FabricEndpoint& sender, size_t num_bytes, uint32_t slot) {
    static const std::vector<std::byte> content(4096, std::byte{7});
    const Deadline deadline = Deadline::after_ms(10'000);
    while (sender.send(std::span(content).first(num_bytes), slot, &context) != 0) {
      drain(sender);
      REQUIRE(!take(channel->poll()).has_value());
      REQUIRE(!deadline.has_passed());
    }
    drain(sender);
  }
  static void drain(FabricEndpoint& endpoint) {
    fi_cq_data_entry completions[8];
    fi_addr_t sources[8];
    while (endpoint.read(completions, sources) > 0) {
    }
  }
};

FabricEndpoint open_one(const FabricProvider& provider) {
  return take(FabricEndpoint::open(provider, "", 4096, 8, 8));
}

LyingPeer lying_peer(const FabricProvider& provider) {
  FabricEndpoint own = open_one(provider), peer = open_one(provider);
  const std::vector<std::byte> address(own.address().begin(), own.address().end());
  REQUIRE(own.meet(peer.address()).ok());
  REQUIRE(peer.meet(own.address()).ok());
  auto companions = tcp_sockets();
  return {take(make_fabric_channel(Side::kWorker, kSmall, std::move(own),
                                   std::move(companions.second))),
          std::move(peer), std::move(companions.first), address};
}

std::vector<FabricProvider> plain_providers() {
  std::vector<FabricProvider> found;
  for (const FabricProvider& one : take(fabric_providers())) {
    if (!one.is_fast) found.push_back(one);
  }
  return found;
}

TEST_CASE("a slot out of range ends the path") {
  for (const FabricProvider& provider : plain_providers()) {
    CAPTURE(provider.name);
    LyingPeer scene = lying_peer(provider);
    scene.send(8, kSmall.num_slots);
    const Error error = receive_error(*scene.channel);
    CHECK(error.code == ErrorCode::kProtocol);
    CHECK(error.message.find("8 bytes for slot 2; there are 2 slots of 256 bytes") !=
          std::string::npos);
    CHECK(scene.channel->poll().error().code == ErrorCode::kProtocol);
    CHECK(scene.channel->publish(0, 1).error().code == ErrorCode::kProtocol);
  }
}

TEST_CASE("a message too long for its room is dropped, and the next one arrives") {
  for (const FabricProvider& provider : plain_providers()) {
    CAPTURE(provider.name);
    LyingPeer scene = lying_peer(provider);
    scene.send(64, 0);
    CHECK(receive(*scene.channel).bytes.size() == 64);
    scene.send(kSmall.request_bytes + 1, 1);
    WaitEntry entry{scene.channel.get(), std::nullopt, std::nullopt};
    wait_any({&entry, 1}, Deadline::after_ms(50), 0);
    CHECK(!entry.arrival.has_value());
    CHECK(!entry.error.has_value());
  }
}

TEST_CASE("who waits for a message sleeps until it comes") {
  for (const FabricProvider& provider : plain_providers()) {
    CAPTURE(provider.name);
    LyingPeer scene = lying_peer(provider);
    for (uint32_t slot = 0; slot < 2; ++slot) {
      scene.send(64, slot);
      CHECK(receive(*scene.channel).bytes.size() == 64);
      // A few wakes are news of the provider's own. One that does not sleep wakes thousands of
      // times.
      int num_wakes = 0;
      for (const Deadline quiet = Deadline::after_ms(100); !quiet.has_passed();) {
        while (take(scene.channel->poll()).has_value()) {
        }
        const WakeSource source = scene.channel->arm(SleepKind::kPoll);
        const int64_t left_ns = scene.channel->next_event_ns() - now_ns();
        pollfd awaited{source.fd, source.events, 0};
        if (left_ns > 0) ::poll(&awaited, 1, 20);
        scene.channel->disarm();
        ++num_wakes;
      }
      CHECK(num_wakes < 100);
    }
  }
}

TEST_CASE("bytes on the connection beside it end the path, and so does its end") {
  for (const bool has_bytes : {true, false}) {
    LyingPeer scene = lying_peer(plain_providers().front());
    const std::byte byte{1};
    if (has_bytes) {
      REQUIRE(::send(scene.companion.get(), &byte, 1, 0) == 1);
    } else {
      scene.companion.close();
    }
    CHECK(receive_error(*scene.channel).code ==
          (has_bytes ? ErrorCode::kProtocol : ErrorCode::kWorkerLost));
  }
}

TEST_CASE("strangers at both endpoints are dropped, and calls go on") {
  for (const FabricProvider& provider : plain_providers()) {
    CAPTURE(provider.name);
    constexpr int kRounds = 300;
    const uint64_t before = num_fabric_strangers();
    FabricEndpoint own = open_one(provider), peer = open_one(provider);
    const std::vector<std::byte> victims[] = {
        {own.address().begin(),  own.address().end() },
        {peer.address().begin(), peer.address().end()}
    };
    REQUIRE(own.meet(peer.address()).ok());
    REQUIRE(peer.meet(own.address()).ok());
    auto companions = tcp_sockets();
    const auto host =
        take(make_fabric_channel(Side::kHost, kSmall, std::move(own), std::move(companions.first)));
    const auto worker = take(
        make_fabric_channel(Side::kWorker, kSmall, std::move(peer), std::move(companions.second)));
    std::atomic<bool> is_over = false;
    std::atomic<int> num_sent = 0;
    std::vector<std::thread> strangers;
    for (const auto& victim : victims) {
      strangers.emplace_back([&provider, &victim, &is_over, &num_sent] {
        FabricEndpoint stranger = open_one(provider);
        REQUIRE(stranger.meet(victim).ok());
        const std::vector<std::byte> content(300, std::byte{9});
        fi_context2 context{};
        // Some are too long for a request slot, some name no slot that there is.
        for (uint32_t turn = 0; !is_over; ++turn) {
          const size_t num_bytes = turn % 3 == 0 ? 300 : 64;
          if (stranger.send(std::span(content).first(num_bytes), turn % 4, &context) == 0)
            ++num_sent;
          LyingPeer::drain(stranger);
          nap_ns(20'000);
        }
      });
    }
    std::thread echo([&] {
      for (int round = 0; round < kRounds; ++round) {
        const Arrival arrival = receive(*worker);
        CHECK(is_filled_with(arrival.bytes, static_cast<uint64_t>(round)));
        std::memcpy(worker->outgoing(arrival.slot).data(), arrival.bytes.data(),
                    arrival.bytes.size());
        REQUIRE(worker->publish(arrival.slot, arrival.bytes.size()).ok());
      }
    });
    for (int round = 0; round < kRounds; ++round) {
      const uint32_t slot = static_cast<uint32_t>(round) % kSmall.num_slots;
      fill(host->outgoing(slot).first(100), static_cast<uint64_t>(round));
      REQUIRE(host->publish(slot, 100).ok());
      const Arrival arrival = receive(*host);
      CHECK(arrival.slot == slot);
      CHECK(is_filled_with(arrival.bytes, static_cast<uint64_t>(round)));
    }
    echo.join();
    // A fast machine may have been done before a stranger had connected, and what a stranger sent
    // may still be on its way: sent is not seen.
    const Deadline deadline = Deadline::after_ms(10'000);
    while ((num_sent < 50 || num_fabric_strangers() == before) && !deadline.has_passed()) {
      WaitEntry entries[] = {
          {host.get(),   std::nullopt, std::nullopt},
          {worker.get(), std::nullopt, std::nullopt}
      };
      wait_any(entries, Deadline::after_ms(1), 0);
      for (const WaitEntry& entry : entries) {
        CHECK(!entry.arrival.has_value());
        CHECK(!entry.error.has_value());
      }
    }
    is_over = true;
    for (std::thread& stranger : strangers) stranger.join();
    CHECK(num_sent >= 50);
    CHECK(num_fabric_strangers() > before);
  }
}

// -- the handshake --

Result<Acceptance> accepted(std::span<const std::byte> offer) {
  Handover offered;
  offered.bytes.assign(offer.begin(), offer.end());
  offered.descriptors.push_back(tcp_sockets().second);
  return accept_fabric(terms_of(kSmall), std::move(offered));
}

TEST_CASE("an offer that is cut off anywhere, or goes on, is refused") {
  const auto offer = take(offer_fabric(terms_of(kSmall)));
  const auto whole = offer->bytes();
  for (size_t length = 0; length < whole.size(); ++length) {
    CAPTURE(length);
    CHECK(accepted(whole.first(length)) == Failed(ErrorCode::kProtocol));
  }
  std::vector<std::byte> longer(whole.begin(), whole.end());
  longer.push_back(std::byte{0});
  CHECK(accepted(longer) == Failed(ErrorCode::kProtocol));
}

TEST_CASE("a name that no line of a log could show is refused") {
  const auto offer = take(offer_fabric(terms_of(kSmall)));
  for (const int odd : {0x00, 0x0a, 0x20, 0x7f, 0xff}) {
    CAPTURE(odd);
    std::vector<std::byte> bytes(offer->bytes().begin(), offer->bytes().end());
    bytes[2] = static_cast<std::byte>(odd);  // the first letter of the first name
    CHECK(accepted(bytes) == Failed(ErrorCode::kProtocol));
  }
}

TEST_CASE("an answer that is cut off, goes on, or names no endpoint is refused") {
  for (size_t which = 0; which < 5; ++which) {
    const auto offer = take(offer_fabric(terms_of(kSmall)));
    auto dialled = tcp_sockets();
    Handover offered = passed(*offer);
    offered.descriptors.push_back(std::move(dialled.second));
    Acceptance worker = take(accept_fabric(terms_of(kSmall), std::move(offered)));
    Handover answer = std::move(worker.answer);
    answer.descriptors.push_back(std::move(dialled.first));
    switch (which) {
      case 0: answer.bytes.clear(); break;
      case 1: answer.bytes.pop_back(); break;
      case 2: answer.bytes.push_back(std::byte{0}); break;
      case 3: answer.bytes[0] = std::byte{200}; break;
      default:  // an address of another length, rightly counted
        answer.bytes.pop_back();
        answer.bytes[1] = static_cast<std::byte>(std::to_integer<int>(answer.bytes[1]) - 1);
    }
    CHECK(offer->complete(std::move(answer)) == Failed(ErrorCode::kProtocol));
  }
}

TEST_CASE("ends without a provider in common are told both lists") {
  const auto offer = take(offer_fabric(terms_of(kSmall)));
  std::vector<std::byte> bytes(offer->bytes().begin(), offer->bytes().end());
  const size_t count = std::to_integer<size_t>(bytes[0]);
  // Each name loses its last letter to another one.
  size_t at = 1;
  for (size_t one = 0; one < count; ++one) {
    at += std::to_integer<size_t>(bytes[at]);
    bytes[at] = std::byte{'?'};
    at += 1 + 8;
    at += 2 + std::to_integer<size_t>(bytes[at]);
  }
  REQUIRE(at == bytes.size());
  const auto refused = accepted(bytes);
  REQUIRE(refused == Failed(ErrorCode::kUnsupported));
  const std::string& text = refused.error().message;
  CHECK(text.find("the host offers ") != std::string::npos);
  CHECK(text.find("? (protocol ") != std::string::npos);
  for (const FabricProvider& one : take(fabric_providers()))
    CHECK(text.find(", the worker has") < text.find(one.name + " (protocol"));
}

TEST_CASE("only hardware is offered where only hardware is asked for") {
  PathTerms terms = terms_of(kSmall);
  terms.is_fast_only = true;
  const auto offer = offer_fabric(terms);
  if (take(fabric_providers()).front().is_fast) return;
  REQUIRE(offer == Failed(ErrorCode::kUnsupported));
  CHECK(offer.error().message.find("none is of fast hardware") != std::string::npos);
}

TEST_CASE("an address of no interface of this machine is named") {
  PathTerms terms = terms_of(kSmall);
  terms.local_host = "203.0.113.77";  // RFC 5737: nobody has it
  const auto offer = offer_fabric(terms);
  REQUIRE(offer == Failed(ErrorCode::kUnsupported));
  CHECK(offer.error().message.find("203.0.113.77") != std::string::npos);
}

}  // namespace
}  // namespace dflash::transport

#endif
