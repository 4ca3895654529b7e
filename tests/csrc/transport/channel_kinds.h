// Every transport as a type, so that one conformance test runs against each of them. `make` yields
// two connected ends, by the handshake of its row where it has one.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <string_view>
#include <utility>

#if __has_include(<rdma/fi_endpoint.h>)
#include "transport/fabric/fabric_channel.h"
#endif
#include "transport/faulty/faulty.h"
#include "transport/handshake.h"
#include "transport/secure_pair.h"
#include "transport/shared/segment.h"
#include "transport/shared/shared_kind.h"
#include "transport/stream/stream.h"

namespace dflash::transport::testing {

struct Loopback {
  static constexpr const char* kKind = "loopback";
  static ChannelPair make(const SlotGeometry& geometry) { return take(make_loopback(geometry)); }
};

inline Segment attach(const Segment& segment, Side writer, const SlotGeometry& geometry) {
  return take(Segment::attach(OwnedFd(::dup(segment.fd())), writer, geometry, kGeneration));
}

struct Shared {
  static constexpr const char* kKind = "shared";
  static ChannelPair make(const SlotGeometry& geometry) { return handshake(kSharedKind, geometry); }
};

inline std::pair<OwnedFd, OwnedFd> unix_sockets() {
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  return {OwnedFd(ends[0]), OwnedFd(ends[1])};
}

inline ChannelPair stream_pair(const SlotGeometry& geometry, std::pair<OwnedFd, OwnedFd> ends,
                               const StreamOptions& options = {}) {
  return {take(make_stream_channel(Side::kHost, geometry, std::move(ends.first), options)),
          take(make_stream_channel(Side::kWorker, geometry, std::move(ends.second), options))};
}

struct Unix {
  static constexpr const char* kKind = "unix";
  static ChannelPair make(const SlotGeometry& geometry) { return handshake(kUnixKind, geometry); }
};

struct Tcp {
  static constexpr const char* kKind = "tcp";
  static ChannelPair make(const SlotGeometry& geometry) { return handshake(kTcpKind, geometry); }
};

// TCP under TLS. Its kind is the same: encryption is a matter of the connection.
struct Tls {
  static constexpr const char* kKind = "tcp";
  static ChannelPair make(const SlotGeometry& geometry) {
    const PathTerms terms = terms_of(geometry);
    SecurePair ends = secure_pair();
    auto offer = take(kTcpKind.offer(terms));
    Handover offered = passed(*offer);
    offered.secured = std::move(ends.second);
    Acceptance accepted = take(kTcpKind.accept(terms, std::move(offered)));
    Handover answer = std::move(accepted.answer);
    answer.secured = std::move(ends.first);
    return {take(offer->complete(std::move(answer))), std::move(accepted.channel)};
  }
};

// The host's end behind a link without delay.
template <class Inner>
struct Emulated {
  static constexpr const char* kKind = Inner::kKind;
  static ChannelPair make(const SlotGeometry& geometry) {
    ChannelPair pair = Inner::make(geometry);
    pair.host = make_emulated(std::move(pair.host), Emulation{});
    return pair;
  }
};

#if __has_include(<rdma/fi_endpoint.h>)

// A path over libfabric by its handshake's steps, with the provider of a name that this machine's
// version has. Both ends have heard of each other when they are handed out: the last words of an
// end that closes before anything was sent are lost with the connection that it began to make.
inline ChannelPair fabric_pair(std::initializer_list<std::string_view> names,
                               const SlotGeometry& geometry) {
  const auto providers = take(fabric_providers());
  const auto one = std::find_if(providers.begin(), providers.end(), [&](const FabricProvider& it) {
    return std::find(names.begin(), names.end(), it.name) != names.end();
  });
  REQUIRE(one != providers.end());
  const auto open = [&] {
    return take(FabricEndpoint::open(*one, "", max_fabric_message(geometry),
                                     num_fabric_sends(geometry), num_fabric_receives(geometry)));
  };
  FabricEndpoint host = open(), worker = open();
  REQUIRE(host.meet(worker.address()).ok());
  REQUIRE(worker.meet(host.address()).ok());
  auto companions = tcp_sockets();
  ChannelPair pair{take(make_fabric_channel(Side::kHost, geometry, std::move(host),
                                            std::move(companions.first))),
                   take(make_fabric_channel(Side::kWorker, geometry, std::move(worker),
                                            std::move(companions.second)))};
  for (const bool is_request : {true, false}) {
    Channel& sender = is_request ? *pair.host : *pair.worker;
    Channel& receiver = is_request ? *pair.worker : *pair.host;
    REQUIRE(sender.publish(0, 1).ok());
    const Deadline deadline = Deadline::after_ms(10'000);
    while (!take(receiver.poll()).has_value()) {
      REQUIRE(!take(sender.poll()).has_value());
      REQUIRE(!deadline.has_passed());
    }
  }
  return pair;
}

// The two providers over ordinary networks. The first was `net` in libfabric 1.17 and is `tcp` in
// later versions.
struct FabricTcp {
  static constexpr const char* kKind = "fabric";
  static ChannelPair make(const SlotGeometry& geometry) {
    return fabric_pair({"net", "tcp"}, geometry);
  }
};
struct FabricRxm {
  static constexpr const char* kKind = "fabric";
  static ChannelPair make(const SlotGeometry& geometry) {
    return fabric_pair({"tcp;ofi_rxm"}, geometry);
  }
};
#define DFLASH_FABRIC_KINDS , FabricTcp, FabricRxm, Emulated<FabricTcp>

#else
#define DFLASH_FABRIC_KINDS
#endif

#define DFLASH_EVERY_KIND                                                                 \
  Loopback, Shared, Unix, Tcp, Tls, Emulated<Loopback>, Emulated<Shared>, Emulated<Unix>, \
      Emulated<Tcp>, Emulated<Tls> DFLASH_FABRIC_KINDS

// Waits for one arrival on one channel; fails the test on an error or when nothing comes for ten
// seconds.
inline Arrival receive(Channel& channel, int64_t spin_ns = 0) {
  WaitEntry entry;
  entry.channel = &channel;
  wait_any({&entry, 1}, Deadline::after_ms(10'000), spin_ns);
  REQUIRE_MESSAGE(!entry.error.has_value(), entry.error->message);
  REQUIRE(entry.arrival.has_value());
  return *entry.arrival;
}

// The error that ends a wait; fails the test when something arrives or nothing happens.
inline Error receive_error(Channel& channel) {
  WaitEntry entry;
  entry.channel = &channel;
  wait_any({&entry, 1}, Deadline::after_ms(10'000), 0);
  REQUIRE(entry.error.has_value());
  return *entry.error;
}

inline void fill(std::span<std::byte> bytes, uint64_t seed) {
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>(seed * 131 + i * 7 + (i >> 8));
}

// Compares in one go: a CHECK per byte would dominate the run.
inline bool is_filled_with(std::span<const std::byte> bytes, uint64_t seed) {
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != static_cast<std::byte>(seed * 131 + i * 7 + (i >> 8))) return false;
  }
  return true;
}

}  // namespace dflash::transport::testing
