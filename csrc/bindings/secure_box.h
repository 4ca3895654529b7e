// An encrypted connection as Python holds it: owned here until a channel, a pulse or a relay takes
// it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>

#include "bindings/errors.h"
#include "transport/secure/secure_socket.h"

namespace dflash::bindings {

struct SecureSocketBox {
  // Control messages are sent by any thread while one receives.
  std::mutex mutex;
  std::unique_ptr<transport::SecureSocket> socket;

  std::unique_ptr<transport::SecureSocket> take() {
    const std::lock_guard lock(mutex);
    if (socket == nullptr)
      raise(Error{ErrorCode::kClosed, "this connection was already handed over"});
    return std::move(socket);
  }
};

}  // namespace dflash::bindings
