// The row of shared memory: each end writes a sealed segment of its own and maps the other's. Both
// messages consist of descriptors alone.
//
//     offer:  the host's segment, and the bell that wakes the host
//     answer: the worker's segment
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "transport/kinds.h"

namespace dflash::transport {

// PathOffer and TransportKind::accept say what these do (kinds.h).
Result<std::unique_ptr<PathOffer>> offer_shared(const PathTerms& terms);
Result<Acceptance> accept_shared(const PathTerms& terms, Handover offered);

inline constexpr Reach kSharedReaches[] = {Reach::kStarted, Reach::kUnixPath};
inline constexpr TransportKind kSharedKind{.name = "shared",
                                           .setting = "shared",
                                           .reaches = kSharedReaches,
                                           .is_dialled = false,
                                           .offer = &offer_shared,
                                           .accept = &accept_shared};

}  // namespace dflash::transport
