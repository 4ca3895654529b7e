// The supervisor: where a program finds it, and the connection to it, which carries whole messages
// of a hand-over, in frames over a Unix socket, with the descriptors that belong to them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/owned_fd.h"
#include "base/result.h"
#include "wire/handover_messages.h"

namespace dflash::c_interface {

// Where a program finds its supervisor: two environment variables, which `dflash-moe llama` sets
// (environment.cc).
inline constexpr const char* kPathVariable = "DFLASH_MOE_HANDOVER";
inline constexpr const char* kTokenVariable = "DFLASH_MOE_HANDOVER_TOKEN_FD";

// The path of the supervisor's socket, and the token that proves that this process was meant.
struct SupervisorAddress {
  std::string path;
  std::array<std::byte, wire::kHandoverTokenBytes> token{};
};

// Reads both variables, and the token out of the pipe that the second one numbers, once: the pipe
// is closed, so that no program started from here inherits it. `path`, where it is not null, stands
// in for the first variable; without the second one the token is then all zeros. Errors:
// kInvalidArgument naming the variable, kTimeout where the pipe stays empty.
Result<SupervisorAddress> find_supervisor(const char* path);

// A message, and exactly as many descriptors as it announces. They close on exec.
struct Received {
  wire::HandoverMessage message;
  std::vector<OwnedFd> descriptors;
};

// Any thread may send; one thread at a time receives. After an error of either, but kTimeout before
// the first byte of a message, nothing more can be done with it.
class Connection {
 public:
  // Connects to the socket at `path`, behind which a process of this user or root must be. Errors:
  // kInvalidArgument for a path that no socket can have, kClosed where nobody listens, kTimeout,
  // kProtocol for another user, kSystem.
  static Result<std::unique_ptr<Connection>> dial(const std::string& path, Deadline deadline);
  // Takes a connected stream socket over.
  explicit Connection(OwnedFd socket) : socket_(std::move(socket)) {}

  // The socket, to poll for something to receive.
  int fd() const { return socket_.get(); }
  // Sends a message. Copies of `descriptors` travel with it. Errors: kProtocol for a field outside
  // its limits, kTimeout, kClosed where the supervisor hung up.
  Status send(const wire::HandoverMessage& message, std::span<const int> descriptors,
              Deadline deadline);
  // Waits until `deadline` for a message; one that has begun must be whole in kFrameRestNs. Errors:
  // kTimeout, kClosed where the supervisor hung up, kProtocol for a malformed message or another
  // number of descriptors than it announces, kSystem where this process had no room for them.
  Result<Received> receive(Deadline deadline);
  // Whether the supervisor has hung up, also while something is left to receive. Any thread.
  bool is_hung_up() const;

 private:
  Status read(std::span<std::byte> into, Deadline deadline, std::vector<OwnedFd>& descriptors);

  OwnedFd socket_;
  std::mutex sending_;   // held while one message is written
  bool is_cut_ = false;  // whether one was written in part; sending_ guards it
};

// A message that has begun must be complete after this time, as on the Python side (framing.py).
inline constexpr int64_t kFrameRestNs = 5'000'000'000;

}  // namespace dflash::c_interface
