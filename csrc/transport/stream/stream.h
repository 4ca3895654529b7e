// A channel over a connected stream socket (Unix or TCP, plain or encrypted). A message is a
// 16-byte prefix (slot u32, zero u32, bytes u64, little-endian) and the slot's bytes. Both go out
// in one vectored write, and small messages arrive with one read. poll() moves bytes in both
// directions.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "transport/channel.h"
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

}  // namespace dflash::transport
