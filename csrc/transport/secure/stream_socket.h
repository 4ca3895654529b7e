// A connected stream socket, plain or encrypted, behind one way to send and to receive: whoever
// moves bytes over it need not know which. Nothing here blocks.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "base/owned_fd.h"
#include "base/result.h"
#include "transport/secure/secure_socket.h"

namespace dflash::transport {

// Movable; not thread-safe.
class StreamSocket {
 public:
  StreamSocket() = default;
  StreamSocket(OwnedFd plain) : plain_(std::move(plain)) {}  // NOLINT: implicit by design
  // Takes a connection whose handshake is over.
  StreamSocket(std::unique_ptr<SecureSocket> secure)  // NOLINT: implicit by design
      : secure_(std::move(secure)) {}

  bool is_open() const { return secure_ != nullptr || plain_.is_open(); }
  int fd() const { return secure_ != nullptr ? secure_->fd() : plain_.get(); }
  void close() {
    plain_.close();
    secure_.reset();
  }

  // Sends as much of `pieces` as is taken now. Returns the bytes, 0 where none are. Errors:
  // kWorkerLost.
  Result<size_t> send(std::span<const iovec> pieces);
  // Whether bytes that send() took have to wait for room in the kernel; flush() moves them on.
  bool has_unsent() const { return secure_ != nullptr && secure_->has_unsent(); }
  Status flush() { return secure_ != nullptr ? secure_->flush() : ok(); }
  // Receives what has come. Returns the bytes, 0 where there are none now. Errors: kWorkerLost on
  // hang-up, kProtocol where an encrypted record was changed on its way.
  Result<size_t> receive(std::span<const iovec> pieces);
  // Whether receive() may return bytes although the descriptor is not readable.
  bool has_pending() const { return secure_ != nullptr && secure_->has_pending(); }

 private:
  OwnedFd plain_;
  std::unique_ptr<SecureSocket> secure_;
};

}  // namespace dflash::transport
