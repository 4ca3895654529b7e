// The kinds of data paths, one row each: how the two ends of a path come to hold a channel. A
// handshake has three steps, the same for every kind:
//
//     host:   offer(terms)            -> bytes and descriptors for the worker
//     worker: accept(terms, offered)  -> its channel, bytes and descriptors for the host
//     host:   complete(answer)        -> its channel
//
// The control plane carries bytes and descriptors without looking at them; both ends know geometry
// and generation beforehand, because the host names them when it asks for the path. A program
// without Python makes both ends through this table, too. A new transport is a folder here and a
// row in kinds.cc (docs/howto/add_a_transport.md).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/owned_fd.h"
#include "base/result.h"
#include "transport/channel.h"

namespace dflash::transport {

// What both ends know of a path before it exists. The wishes at the end concern some kinds only;
// the others ignore them.
struct PathTerms {
  SlotGeometry geometry;
  uint64_t generation = 0;
  // Replies that a device of the host may register for writing (shared/segment.h). Only a host that
  // started the worker may ask for it.
  bool is_open = false;
  int socket_buffer_bytes = 0;  // each way; 0 keeps the system's
  int user_timeout_ms = 0;      // of TCP; 0 keeps the system's
};

// What one end hands to the other. Bytes come from the peer: whoever takes them checks them.
struct Handover {
  std::vector<std::byte> bytes;  // at most kMaxHandoverBytes
  std::vector<OwnedFd> descriptors;
};
inline constexpr size_t kMaxHandoverBytes = 4096;  // room for several addresses of a fabric

// The host's end between its offer and the worker's answer. Destroying it gives the path up.
class PathOffer {
 public:
  virtual ~PathOffer() = default;
  // For the worker. Both stay this object's: sending a descriptor makes the worker's duplicate.
  virtual std::span<const std::byte> bytes() const { return {}; }
  virtual std::vector<int> descriptors() const = 0;
  // Once. `answer` is the worker's; with a dialled kind the data connection is its only descriptor.
  // Errors: kProtocol for an answer that does not fit; those of the system.
  virtual Result<std::unique_ptr<Channel>> complete(Handover answer) = 0;
};

struct Acceptance {
  std::unique_ptr<Channel> channel;
  Handover answer;
};

// How a host reaches a worker: the forms of an address in a topology.
enum class Reach : uint8_t {
  kStarted,      // started by the host, nothing said
  kStartedUnix,  // started by the host, `address: unix`
  kStartedTcp,   // started by the host, `address: tcp`
  kUnixPath,     // already listening on a Unix socket
  kTcpHost,      // already listening on a TCP port, maybe on another machine
};
const char* reach_name(Reach reach);

struct TransportKind {
  const char* name;     // on the wire, in statistics, in error messages
  const char* setting;  // the value of the setting `transport` that means this kind
  std::span<const Reach> reaches;
  // Descriptors cannot reach the worker with the offer, so the control plane dials it: an
  // authenticated connection (role data) becomes the only descriptor of accept() at the worker and
  // of complete() at the host, and the session's pulse is dialled likewise.
  bool is_dialled;
  Result<std::unique_ptr<PathOffer>> (*offer)(const PathTerms& terms);
  // Errors: kProtocol for an offer that does not fit, before anything of it is used.
  Result<Acceptance> (*accept)(const PathTerms& terms, Handover offered);
};

// All of them. Where several kinds serve one reach, the setting `auto` takes the first.
std::span<const TransportKind> transport_kinds();

// The row of that name. Errors: kUnsupported naming the rows there are.
Result<const TransportKind*> find_kind(std::span<const TransportKind> kinds, std::string_view name);

// Makes a path of this kind within this process and sends one message each way, asleep in between.
// Errors say what this machine lacks.
Status try_kind(const TransportKind& kind);

}  // namespace dflash::transport
