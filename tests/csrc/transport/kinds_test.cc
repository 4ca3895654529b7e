// The table of transports: every row, and one that only this test adds, makes both ends by the same
// three steps, and refuses handovers that are not its own.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <set>
#include <string>
#include <vector>

#include "failed.h"
#include "transport/handshake.h"
#include "transport/shared/shared_kind.h"
#include "transport/toy_kind.h"

namespace dflash::transport {
namespace {

using namespace testing;

constexpr SlotGeometry kSmall{2, 64, 128};

TEST_CASE("names differ, and every row says how its workers are reached") {
  std::set<std::string> names;
  for (const TransportKind& kind : kinds_and_toy()) {
    CHECK(names.insert(kind.name).second);
    CHECK(!kind.reaches.empty());
    for (const Reach reach : kind.reaches) CHECK(std::string(reach_name(reach)) != "");
  }
}

TEST_CASE("a row is found by its name, and an unknown name lists the rows") {
  const std::vector<TransportKind> kinds = kinds_and_toy();
  const bool is_toy = take(find_kind(kinds, "toy"))->offer == &offer_toy;
  CHECK(is_toy);
  const auto missing = find_kind(kinds, "pigeon");
  REQUIRE(missing == Failed(ErrorCode::kUnsupported));
  CHECK(missing.error().message ==
        "transport 'pigeon' is not one of shared, unix, tcp, fabric, toy");
}

TEST_CASE("every row carries messages on this machine") {
  for (const TransportKind& kind : kinds_and_toy()) {
    CAPTURE(kind.name);
    const Status tried = try_kind(kind);
    CHECK_MESSAGE(tried.ok(), (tried.ok() ? std::string() : tried.error().message));
  }
}

// Takes one descriptor away from a handover, adds one, or adds a byte.
std::vector<Handover> misfits(const std::vector<int>& descriptors,
                              std::span<const std::byte> bytes) {
  std::vector<Handover> made;
  for (const int change : {-1, 1, 0}) {
    Handover handover;
    handover.bytes.assign(bytes.begin(), bytes.end());
    if (change == 0) handover.bytes.push_back(std::byte{1});
    for (const int descriptor : descriptors)
      handover.descriptors.push_back(take(OwnedFd::duplicate(descriptor)));
    if (change > 0) handover.descriptors.push_back(take(OwnedFd::duplicate(0)));
    if (change < 0 && handover.descriptors.empty()) continue;
    if (change < 0) handover.descriptors.pop_back();
    made.push_back(std::move(handover));
  }
  return made;
}

TEST_CASE("an offer with other descriptors or bytes is refused before it is used") {
  for (const TransportKind& kind : kinds_and_toy()) {
    CAPTURE(kind.name);
    const PathTerms terms = terms_of(kSmall);
    const auto offer = take(kind.offer(terms));
    std::pair<OwnedFd, OwnedFd> dialled;
    std::vector<int> descriptors = offer->descriptors();
    if (kind.is_dialled) {
      dialled = tcp_sockets();
      descriptors.push_back(dialled.second.get());
    }
    for (Handover& misfit : misfits(descriptors, offer->bytes())) {
      const auto refused = kind.accept(terms, std::move(misfit));
      REQUIRE(refused == Failed(ErrorCode::kProtocol));
      CHECK(refused.error().message.find(std::string("transport ") + kind.name) == 0);
    }
  }
}

TEST_CASE("an answer with other descriptors or bytes is refused before it is used") {
  for (const TransportKind& kind : kinds_and_toy()) {
    CAPTURE(kind.name);
    const PathTerms terms = terms_of(kSmall);
    for (size_t which = 0; which < 3; ++which) {
      const auto offer = take(kind.offer(terms));
      std::pair<OwnedFd, OwnedFd> dialled;
      Handover offered = passed(*offer);
      if (kind.is_dialled) {
        dialled = tcp_sockets();
        offered.descriptors.push_back(std::move(dialled.second));
      }
      Acceptance accepted = take(kind.accept(terms, std::move(offered)));
      std::vector<int> descriptors;
      for (const OwnedFd& descriptor : accepted.answer.descriptors)
        descriptors.push_back(descriptor.get());
      if (kind.is_dialled) descriptors.push_back(dialled.first.get());
      std::vector<Handover> answers = misfits(descriptors, accepted.answer.bytes);
      if (which >= answers.size()) continue;
      CHECK(offer->complete(std::move(answers[which])) == Failed(ErrorCode::kProtocol));
    }
  }
}

TEST_CASE("a path of another generation or geometry is refused where the transport can tell") {
  PathTerms other = terms_of(kSmall);
  other.generation = kGeneration + 1;
  PathTerms larger = terms_of({4, 64, 128});
  for (const PathTerms& terms : {other, larger}) {
    const auto offer = take(offer_shared(terms_of(kSmall)));
    CHECK(accept_shared(terms, passed(*offer)) == Failed(ErrorCode::kProtocol));
  }
}

TEST_CASE("a geometry out of its limits is refused by every row") {
  for (const TransportKind& kind : kinds_and_toy()) {
    CAPTURE(kind.name);
    if (std::string(kind.name) == "toy") continue;  // its channel refuses, later
    CHECK(!kind.offer(terms_of({0, 64, 128})).ok());
    CHECK(!kind.offer(terms_of({2, 63, 128})).ok());
  }
}

TEST_CASE("an offer that is given up hangs the worker's end up") {
  for (const TransportKind& kind : kinds_and_toy()) {
    if (kind.is_dialled || kind.name == std::string("shared")) continue;
    CAPTURE(kind.name);
    auto offer = take(kind.offer(terms_of(kSmall)));
    Acceptance accepted = take(kind.accept(terms_of(kSmall), passed(*offer)));
    offer.reset();
    CHECK(accepted.channel->poll() == Failed(ErrorCode::kWorkerLost));
  }
}

}  // namespace
}  // namespace dflash::transport
