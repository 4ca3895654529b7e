// A channel over libfabric: unconnected, reliable endpoints (FI_EP_RDM) that send messages
// (FI_MSG), with the slot as immediate data. Receives are posted ahead into memory of this end, one
// per slot and one more, and never grow: whatever else reaches the endpoint takes one of them for
// as long as it takes to see that it is not the peer's.
//
// The payload is in clear and not authenticated, whatever the connections beside it are; who may
// use it where stands in docs/security.md.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "transport/kinds.h"

namespace dflash::transport {

// What libfabric offers here. Two ends can talk whose provider, protocol and version are the same.
struct FabricProvider {
  std::string name;  // such as "verbs;ofi_rxm"
  uint32_t protocol = 0, protocol_version = 0;
  // Whether hardware moves the bytes. Over ordinary networks a fabric gains nothing over TCP.
  bool is_fast = false;
};

// Returns the providers that a path can use on this machine, those with hardware first. The first
// call of a process takes 0.1 to 0.4 s, in which libfabric looks at the machine; later ones take
// about a millisecond. Errors: kUnsupported where there is no libfabric, or it has no such
// provider.
Result<std::vector<FabricProvider>> fabric_providers();

// Returns how many messages have reached endpoints of this process that were not from their peer.
// Any thread. They were dropped, and those that libfabric could not say the sender of are not
// counted.
uint64_t num_fabric_strangers();

// The row of fabrics. Each end opens an endpoint and tells the other its address; the dialled data
// connection stays open beside it and carries nothing, because no provider tells of a peer that was
// killed, and a socket does. fabric_handover.h has the bytes of both.

// PathOffer and TransportKind::accept say what these do (kinds.h). Errors, besides those:
// kUnsupported where the ends have no provider in common, naming both lists.
Result<std::unique_ptr<PathOffer>> offer_fabric(const PathTerms& terms);
Result<Acceptance> accept_fabric(const PathTerms& terms, Handover offered);

inline constexpr Reach kFabricReaches[] = {Reach::kStartedTcp, Reach::kTcpHost};
inline constexpr TransportKind kFabricKind{.name = "fabric",
                                           .setting = "fabric",
                                           .reaches = kFabricReaches,
                                           .is_dialled = true,
                                           .is_clear = true,
                                           .offer = &offer_fabric,
                                           .accept = &accept_fabric};

}  // namespace dflash::transport
