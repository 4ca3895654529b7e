// A channel over a connected stream socket (Unix or TCP, plain or encrypted). A message is a
// 16-byte prefix (slot u32, zero u32, bytes u64, little-endian) and the slot's bytes. Both go out
// in one vectored write, and small messages arrive with one read. poll() moves bytes in both
// directions.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>

#include "base/owned_fd.h"
#include "transport/channel.h"
#include "transport/kinds.h"
#include "transport/secure/stream_socket.h"

namespace dflash::transport {

// Socket options that a path may wish for.
struct StreamOptions {
  int send_buffer_bytes = 0;     // SO_SNDBUF; 0 keeps the system's
  int receive_buffer_bytes = 0;  // SO_RCVBUF; 0 keeps the system's
  int user_timeout_ms = 0;       // TCP_USER_TIMEOUT; 0 keeps the system's; ignored on Unix sockets
};

// Makes a channel of a connected, authenticated socket, plain or encrypted, which it makes
// non-blocking (and, for TCP, TCP_NODELAY). Errors: kInvalidArgument for geometry or a socket of
// another family, kOutOfMemory, kSystem.
Result<std::unique_ptr<Channel>> make_stream_channel(Side side, const SlotGeometry& geometry,
                                                     StreamSocket socket,
                                                     const StreamOptions& options);

// The rows of stream sockets. With unix, the worker gets one end of a socket pair. With tcp, both
// ends get the connection that the control plane has dialled and authenticated. No bytes are handed
// over.
//
//     unix  offer: one end of a pair        answer: nothing
//     tcp   offer: the data connection      answer: the data connection

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

// For probes, floors and tests: returns both ends of a connection over the loopback interface, as
// the control plane would have dialled it. Both block, and neither has an option set.
//
// Errors: kSystem, naming the step that failed.
Result<std::pair<OwnedFd, OwnedFd>> tcp_pair();

}  // namespace dflash::transport
