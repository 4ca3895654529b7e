// Both ends of an encrypted connection over the loopback interface, within one thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>
#include <poll.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "transport/handshake.h"
#include "transport/secure/libssl.h"
#include "transport/secure/secure_socket.h"

namespace dflash::transport::testing {

using SecurePair = std::pair<std::unique_ptr<SecureSocket>, std::unique_ptr<SecureSocket>>;

inline PresharedKey key_named(const std::string& identity, unsigned seed = 1) {
  PresharedKey key{identity, {}};
  for (size_t i = 0; i < key.key.size(); ++i) key.key[i] = static_cast<std::byte>(seed + i);
  return key;
}

// Goes on with both handshakes until each has ended, and returns how.
struct Outcome {
  Result<bool> dialling = false, accepting = false;
};
inline Outcome shake_hands(SecureSocket& dialling, SecureSocket& accepting) {
  Outcome outcome;
  const Deadline deadline = Deadline::after_ms(10'000);
  const auto is_under_way = [](const Result<bool>& step) { return step.ok() && !step.value(); };
  while (is_under_way(outcome.dialling) || is_under_way(outcome.accepting)) {
    if (is_under_way(outcome.dialling)) outcome.dialling = dialling.handshake();
    if (is_under_way(outcome.accepting)) outcome.accepting = accepting.handshake();
    REQUIRE(!deadline.has_passed());
  }
  return outcome;
}

inline std::unique_ptr<SecureSocket> secure_end(SecureSide side, OwnedFd socket, PresharedKey key,
                                                const SecureOptions& options = {}) {
  return take(SecureSocket::create(side, std::move(socket), {std::move(key)}, options));
}

// Both ends, handshake over. Machines without libssl fail here, by name.
inline SecurePair secure_pair(const SecureOptions& options = {}) {
  auto ends = tcp_sockets();
  auto dialling =
      secure_end(SecureSide::kDialling, std::move(ends.first), key_named("data w0"), options);
  auto accepting =
      secure_end(SecureSide::kAccepting, std::move(ends.second), key_named("data w0"), options);
  const Outcome outcome = shake_hands(*dialling, *accepting);
  REQUIRE(outcome.dialling.ok());
  REQUIRE(outcome.accepting.ok());
  return {std::move(dialling), std::move(accepting)};
}

}  // namespace dflash::transport::testing
