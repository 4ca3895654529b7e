// One end of a raw ping-pong, the floor of a transport.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "base/result.h"

namespace dflash::measure {

// One end of a raw ping-pong. Both ends move `payload_bytes` from or to private memory.
class Pipe {
 public:
  virtual ~Pipe() = default;
  virtual Status send(std::span<const std::byte> payload) = 0;
  // Returns the payload, either where it lies in shared memory or read into `private_memory`.
  virtual Result<std::span<const std::byte>> receive(std::span<std::byte> private_memory) = 0;
};

// A pipe that has libssl encrypt on a connected, blocking socket, as its manual pages show: libssl
// itself reads and writes the socket. The handshake (TLS 1.3 with a fixed key, the cipher suite of
// encrypted connections) happens within the first message. The socket is borrowed. Errors:
// kUnsupported where libssl is missing, kSystem.
Result<std::unique_ptr<Pipe>> make_tls_pipe(int socket, bool is_dialling);

// Both ends of a ping-pong over libfabric, with the provider that a path within this machine takes.
// Memory is not registered, which providers over ordinary networks do not ask for. Errors:
// kUnsupported without libfabric, and those of FabricEndpoint::open.
struct PipePair {
  std::unique_ptr<Pipe> host, worker;
};
Result<PipePair> make_fabric_pipes(size_t payload_bytes);

}  // namespace dflash::measure
