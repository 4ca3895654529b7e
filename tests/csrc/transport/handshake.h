// The control plane's part of a handshake, within one process: bytes are copied, descriptors
// duplicated, and what a dialled kind needs is dialled.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>

#include <memory>
#include <utility>

#include "transport/kinds.h"
#include "transport/loopback/loopback.h"
#include "transport/stream/stream.h"

namespace dflash::transport::testing {

inline constexpr uint64_t kGeneration = 7;

template <class T>
T take(Result<T> result) {
  REQUIRE_MESSAGE(result.ok(), (result.ok() ? std::string() : result.error().message));
  return std::move(result).value();
}

inline std::pair<OwnedFd, OwnedFd> tcp_sockets() { return take(tcp_pair()); }

inline Handover passed(const PathOffer& offer) {
  Handover handover;
  handover.bytes.assign(offer.bytes().begin(), offer.bytes().end());
  for (const int descriptor : offer.descriptors())
    handover.descriptors.push_back(take(OwnedFd::duplicate(descriptor)));
  return handover;
}

inline PathTerms terms_of(const SlotGeometry& geometry) {
  PathTerms terms;
  terms.geometry = geometry;
  terms.generation = kGeneration;
  return terms;
}

// Both ends of a path of this kind.
inline ChannelPair handshake(const TransportKind& kind, const SlotGeometry& geometry) {
  const PathTerms terms = terms_of(geometry);
  std::pair<OwnedFd, OwnedFd> dialled;
  if (kind.is_dialled) dialled = tcp_sockets();
  const auto offer = take(kind.offer(terms));
  Handover offered = passed(*offer);
  if (kind.is_dialled) offered.descriptors.push_back(std::move(dialled.second));
  Acceptance accepted = take(kind.accept(terms, std::move(offered)));
  if (kind.is_dialled) accepted.answer.descriptors.push_back(std::move(dialled.first));
  return {take(offer->complete(std::move(accepted.answer))), std::move(accepted.channel)};
}

}  // namespace dflash::transport::testing
