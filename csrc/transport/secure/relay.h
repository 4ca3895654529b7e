// Decrypts for somebody who has only a descriptor: a thread of its own carries bytes between an
// encrypted connection and a socket pair of this machine. The state of a TLS connection cannot be
// passed to another process, a descriptor can.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <thread>

#include "base/owned_fd.h"
#include "base/result.h"
#include "transport/secure/secure_socket.h"

namespace dflash::transport {

class Relay {
 public:
  // Takes a connection whose handshake is over. Errors: kSystem.
  static Result<std::unique_ptr<Relay>> start(std::unique_ptr<SecureSocket> secure);
  // Hangs up at both ends and joins the thread.
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // The plain end, which the caller owns from here on; once. It hangs up when the encrypted
  // connection does or when a record of it was changed on its way, and the other way round.
  OwnedFd take_plain() { return std::move(theirs_); }

 private:
  Relay(std::unique_ptr<SecureSocket> secure, OwnedFd ours, OwnedFd theirs, OwnedFd bell);
  void run();

  std::unique_ptr<SecureSocket> secure_;  // the thread's, as is ours_
  OwnedFd ours_;
  OwnedFd theirs_;
  OwnedFd bell_;  // an eventfd, rung once, to stop
  std::thread thread_;
};

}  // namespace dflash::transport
