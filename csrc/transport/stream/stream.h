// A channel over a connected stream socket (Unix or TCP): a 16-byte prefix (slot u32, zero u32,
// bytes u64, little-endian) and the slot's bytes in one vectored write; small messages arrive with
// one read. Both directions progress in poll().
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "base/owned_fd.h"
#include "transport/channel.h"

namespace dflash::transport {

struct StreamOptions {
  int send_buffer_bytes = 0;     // SO_SNDBUF; 0 keeps the system's
  int receive_buffer_bytes = 0;  // SO_RCVBUF; 0 keeps the system's
  int user_timeout_ms = 0;       // TCP_USER_TIMEOUT; 0 keeps the system's; ignored on Unix sockets
};

// Takes a connected, authenticated socket; sets it non-blocking (and TCP_NODELAY).
Result<std::unique_ptr<Channel>> make_stream_channel(Side side, const SlotGeometry& geometry,
                                                     OwnedFd socket, const StreamOptions& options);

}  // namespace dflash::transport
