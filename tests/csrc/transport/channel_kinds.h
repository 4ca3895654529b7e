// Every transport as a type, so that one conformance test runs against each of them. `make` yields
// two connected ends.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <memory>
#include <utility>

#include "transport/faulty/faulty.h"
#include "transport/loopback/loopback.h"
#include "transport/shared/segment.h"
#include "transport/stream/stream.h"

namespace dflash::transport::testing {

inline constexpr uint64_t kGeneration = 7;

template <class T>
T take(Result<T> result) {
  REQUIRE_MESSAGE(result.ok(), (result.ok() ? std::string() : result.error().message));
  return std::move(result).value();
}

struct Loopback {
  static constexpr const char* kKind = "loopback";
  static ChannelPair make(const SlotGeometry& geometry) { return take(make_loopback(geometry)); }
};

inline Segment attach(const Segment& segment, Side writer, const SlotGeometry& geometry) {
  return take(Segment::attach(OwnedFd(::dup(segment.fd())), writer, geometry, kGeneration));
}

struct Shared {
  static constexpr const char* kKind = "shared";
  static ChannelPair make(const SlotGeometry& geometry) {
    Segment request = take(Segment::create(Side::kHost, geometry, kGeneration));
    Segment reply = take(Segment::create(Side::kWorker, geometry, kGeneration));
    Segment request_view = attach(request, Side::kHost, geometry);
    Segment reply_view = attach(reply, Side::kWorker, geometry);
    const int bell = ::eventfd(0, EFD_CLOEXEC);
    REQUIRE(bell >= 0);
    OwnedFd worker_bell(::dup(bell));
    return {take(make_shared_channel(Side::kHost, geometry, std::move(request),
                                     std::move(reply_view), OwnedFd(bell))),
            take(make_shared_channel(Side::kWorker, geometry, std::move(reply),
                                     std::move(request_view), std::move(worker_bell)))};
  }
};

inline std::pair<OwnedFd, OwnedFd> unix_sockets() {
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  return {OwnedFd(ends[0]), OwnedFd(ends[1])};
}

inline std::pair<OwnedFd, OwnedFd> tcp_sockets() {
  const OwnedFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  REQUIRE(::bind(listener.get(), generic, length) == 0);
  REQUIRE(::listen(listener.get(), 1) == 0);
  REQUIRE(::getsockname(listener.get(), generic, &length) == 0);
  OwnedFd ours(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  REQUIRE(::connect(ours.get(), generic, length) == 0);
  OwnedFd theirs(::accept(listener.get(), nullptr, nullptr));
  REQUIRE(theirs.is_open());
  return {std::move(ours), std::move(theirs)};
}

inline ChannelPair stream_pair(const SlotGeometry& geometry, std::pair<OwnedFd, OwnedFd> ends,
                               const StreamOptions& options = {}) {
  return {take(make_stream_channel(Side::kHost, geometry, std::move(ends.first), options)),
          take(make_stream_channel(Side::kWorker, geometry, std::move(ends.second), options))};
}

struct Unix {
  static constexpr const char* kKind = "unix";
  static ChannelPair make(const SlotGeometry& geometry) {
    return stream_pair(geometry, unix_sockets());
  }
};

struct Tcp {
  static constexpr const char* kKind = "tcp";
  static ChannelPair make(const SlotGeometry& geometry) {
    return stream_pair(geometry, tcp_sockets());
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

#define DFLASH_EVERY_KIND \
  Loopback, Shared, Unix, Tcp, Emulated<Loopback>, Emulated<Shared>, Emulated<Unix>, Emulated<Tcp>

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
