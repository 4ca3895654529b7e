// Every transport as a type, so that one conformance test runs against each of them. `make` yields
// two connected ends, by the handshake of its row where it has one.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <memory>
#include <utility>

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

#define DFLASH_EVERY_KIND                                                                 \
  Loopback, Shared, Unix, Tcp, Tls, Emulated<Loopback>, Emulated<Shared>, Emulated<Unix>, \
      Emulated<Tcp>, Emulated<Tls>

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
