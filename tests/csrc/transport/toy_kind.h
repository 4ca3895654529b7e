// A transport that exists only here: a row for the table that tells both ends something in bytes,
// as a fabric would tell its addresses. What docs/howto/add_a_transport.md asks of a new one.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "transport/fabric/fabric.h"
#include "transport/kinds.h"
#include "transport/stream/stream.h"

namespace dflash::transport::testing {

Result<std::unique_ptr<PathOffer>> offer_toy(const PathTerms& terms);
Result<Acceptance> accept_toy(const PathTerms& terms, Handover offered);

inline constexpr Reach kToyReaches[] = {Reach::kStarted};
inline constexpr TransportKind kToyKind{.name = "toy",
                                        .setting = "toy",
                                        .reaches = kToyReaches,
                                        .is_dialled = false,
                                        .offer = &offer_toy,
                                        .accept = &accept_toy};

// What each end tells the other: who speaks, and the generation it was told of.
inline std::vector<std::byte> toy_address(char end, uint64_t generation) {
  std::vector<std::byte> address{static_cast<std::byte>(end)};
  for (size_t at = 0; at < sizeof generation; ++at)
    address.push_back(static_cast<std::byte>(generation >> (8 * at)));
  return address;
}

inline Status check_toy(const char* what, const Handover& found, size_t num_descriptors,
                        const std::vector<std::byte>& expected) {
  DFLASH_TRY(check_handover(kToyKind, what, found, num_descriptors, expected.size()));
  if (found.bytes == expected) return ok();
  return Error{ErrorCode::kProtocol, std::string("transport toy: its ") + what + " is another's"};
}

class ToyOffer final : public PathOffer {
 public:
  ToyOffer(const PathTerms& terms, OwnedFd own, OwnedFd theirs)
      : terms_(terms),
        address_(toy_address('h', terms.generation)),
        own_(std::move(own)),
        theirs_(std::move(theirs)) {}
  std::span<const std::byte> bytes() const override { return address_; }
  std::vector<int> descriptors() const override { return {theirs_.get()}; }
  Result<std::unique_ptr<Channel>> complete(Handover answer) override {
    DFLASH_TRY(check_toy("answer", answer, 0, toy_address('w', terms_.generation)));
    theirs_.close();
    return make_stream_channel(Side::kHost, terms_.geometry, std::move(own_), {});
  }

 private:
  const PathTerms terms_;
  const std::vector<std::byte> address_;
  OwnedFd own_, theirs_;
};

inline Result<std::unique_ptr<PathOffer>> offer_toy(const PathTerms& terms) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    return system_error("socketpair");
  return std::unique_ptr<PathOffer>(
      std::make_unique<ToyOffer>(terms, OwnedFd(ends[0]), OwnedFd(ends[1])));
}

inline Result<Acceptance> accept_toy(const PathTerms& terms, Handover offered) {
  DFLASH_TRY(check_toy("offer", offered, 1, toy_address('h', terms.generation)));
  auto channel =
      make_stream_channel(Side::kWorker, terms.geometry, std::move(offered.descriptors[0]), {});
  if (!channel.ok()) return std::move(channel).error();
  return Acceptance{
      std::move(channel).value(), {toy_address('w', terms.generation), {}}
  };
}

// The table of this build without a fabric that this machine has no library for, and the toy behind
// it.
inline std::vector<TransportKind> kinds_and_toy() {
  std::vector<TransportKind> kinds;
  for (const TransportKind& kind : transport_kinds()) {
    if (kind.name == kFabricKind.name && !fabric_providers().ok()) {
      MESSAGE("without the fabric: ", fabric_providers().error().message);
    } else {
      kinds.push_back(kind);
    }
  }
  kinds.push_back(kToyKind);
  return kinds;
}

}  // namespace dflash::transport::testing
