// The bytes by which the two ends of a fabric find each other. Each comes from a peer that has
// proved nothing but its key, so that every length is held against what is there.
//
//     offer     count, then for each provider: name, protocol, version, address
//     answer    which of them, address
//
// Integers are little-endian, as on every machine that this runs on; a name or an address follows
// its length.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "transport/fabric/fabric.h"
#include "transport/kinds.h"

namespace dflash::transport {

// The most providers that are offered, the longest name of one and the longest address of an
// endpoint; all of them fit a handover.
inline constexpr size_t kMaxFabricOffers = 8;
inline constexpr size_t kMaxFabricNameBytes = 64;
inline constexpr size_t kMaxFabricAddressBytes = 256;
static_assert(1 + kMaxFabricOffers * (1 + kMaxFabricNameBytes + 8 + 2 + kMaxFabricAddressBytes) <=
              kMaxHandoverBytes);

// An endpoint that a peer may talk to.
struct FabricOffered {
  FabricProvider provider;  // without `is_fast`, which is each end's own to know
  std::vector<std::byte> address;
};

// The offer that was taken, counted from 0, and the endpoint of whoever took it.
struct FabricAnswered {
  uint8_t which = 0;
  std::vector<std::byte> address;
};

// Names and addresses are within their limits and not empty, and there is at least one offer.
std::vector<std::byte> encode_fabric_offer(std::span<const FabricOffered> offers);
std::vector<std::byte> encode_fabric_answer(const FabricAnswered& answer);

// Errors: kProtocol for a field that is missing, empty or over its limit, for a name that is not of
// printable ASCII, and for bytes that follow the last field.
Result<std::vector<FabricOffered>> decode_fabric_offer(std::span<const std::byte> bytes);
Result<FabricAnswered> decode_fabric_answer(std::span<const std::byte> bytes);

}  // namespace dflash::transport
