// The rows of stream sockets. With unix, the worker gets one end of a socket pair. With tcp, both
// ends get the connection that the control plane has dialled and authenticated. No bytes are handed
// over.
//
//     unix  offer: one end of a pair        answer: nothing
//     tcp   offer: the data connection      answer: the data connection
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "transport/kinds.h"

namespace dflash::transport {

// PathOffer and TransportKind::accept say what these do (kinds.h).
Result<std::unique_ptr<PathOffer>> offer_unix(const PathTerms& terms);
Result<Acceptance> accept_unix(const PathTerms& terms, Handover offered);
Result<std::unique_ptr<PathOffer>> offer_tcp(const PathTerms& terms);
Result<Acceptance> accept_tcp(const PathTerms& terms, Handover offered);

inline constexpr Reach kUnixReaches[] = {Reach::kStarted, Reach::kStartedUnix, Reach::kUnixPath};
inline constexpr TransportKind kUnixKind{.name = "unix",
                                         .setting = "stream",
                                         .reaches = kUnixReaches,
                                         .is_dialled = false,
                                         .offer = &offer_unix,
                                         .accept = &accept_unix};

inline constexpr Reach kTcpReaches[] = {Reach::kStartedTcp, Reach::kTcpHost};
inline constexpr TransportKind kTcpKind{.name = "tcp",
                                        .setting = "stream",
                                        .reaches = kTcpReaches,
                                        .is_dialled = true,
                                        .offer = &offer_tcp,
                                        .accept = &accept_tcp};

}  // namespace dflash::transport
