// The kinds of data paths, one row each: how the two ends of a path come to hold a channel. The
// handshake has three steps, which are the same for every kind:
//
//     host:   offer(terms)            -> bytes and descriptors for the worker
//     worker: accept(terms, offered)  -> its channel, bytes and descriptors for the host
//     host:   complete(answer)        -> its channel
//
// The control plane carries bytes and descriptors without looking at them. Both ends know geometry
// and generation beforehand, because the host names them when it asks for the path. A program
// without Python makes both ends through this table, too. A new transport is a folder here and a
// row in kinds.cc (docs/howto/add_a_transport.md).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/owned_fd.h"
#include "base/result.h"
#include "transport/channel.h"
#include "transport/secure/secure_socket.h"

namespace dflash::transport {

// What both ends know of a path before it exists. The last fields are wishes that concern some
// kinds only; the others ignore them.
struct PathTerms {
  SlotGeometry geometry;
  uint64_t generation = 0;
  // Whether a device of the host may register the replies' memory for writing (shared/segment.h).
  // Only a host that started the worker may ask for it.
  bool is_open = false;
  int socket_buffer_bytes = 0;  // in each direction; 0 keeps the system's
  int user_timeout_ms = 0;      // TCP_USER_TIMEOUT; 0 keeps the system's
  // The host's own numeric address on the network of the worker; empty stands for one machine.
  std::string local_host = {};
  // Whether a fabric may only be one behind which hardware moves the bytes.
  bool is_fast_only = false;
};

// What one end hands to the other. It comes from the peer, so whoever takes it checks it.
struct Handover {
  std::vector<std::byte> bytes;  // at most kMaxHandoverBytes
  std::vector<OwnedFd> descriptors;
  // The dialled data connection where it is encrypted; it is then none of `descriptors`.
  std::unique_ptr<SecureSocket> secured = nullptr;
};
inline constexpr size_t kMaxHandoverBytes = 4096;  // room for several addresses of a fabric

// The host's end between its offer and the worker's answer. Destroying it gives the path up. Not
// thread-safe.
class PathOffer {
 public:
  virtual ~PathOffer() = default;
  // What the worker gets. Both stay this object's: sending a descriptor makes the worker's
  // duplicate.
  virtual std::span<const std::byte> bytes() const { return {}; }
  virtual std::vector<int> descriptors() const = 0;
  // Makes the host's channel; called once. `answer` is the worker's; with a dialled kind the data
  // connection is its only descriptor, or `secured`. Errors: kProtocol for an answer that does not
  // fit, and those of the system.
  virtual Result<std::unique_ptr<Channel>> complete(Handover answer) = 0;
};

// The worker's end, complete, and what the host needs to complete its own.
struct Acceptance {
  std::unique_ptr<Channel> channel;
  Handover answer;
};

// How a host reaches a worker: the forms that an address in a topology can have.
enum class Reach : uint8_t {
  kStarted,      // started by the host, without an address
  kStartedUnix,  // started by the host, with `address: unix`
  kStartedTcp,   // started by the host, with `address: tcp`
  kUnixPath,     // already listening on a Unix socket
  kTcpHost,      // already listening on a TCP port, maybe on another machine
};
// The name of a reach in reports, such as "started, unix".
const char* reach_name(Reach reach);

// One row of the table.
struct TransportKind {
  const char* name;     // as it stands on the wire, in statistics and in error messages
  const char* setting;  // the value of the setting `transport` that stands for this kind
  std::span<const Reach> reaches;
  // Whether the control plane dials the worker, because descriptors cannot reach it with the offer.
  // An authenticated connection (role data) then becomes the only descriptor of accept() at the
  // worker and of complete() at the host, and the session's pulse is dialled likewise.
  bool is_dialled;
  // Whether messages travel in clear even where the dialled connections are encrypted.
  bool is_clear = false;
  Result<std::unique_ptr<PathOffer>> (*offer)(const PathTerms& terms);
  // Makes the worker's end. Errors: kProtocol for an offer that does not fit, before any of it is
  // used.
  Result<Acceptance> (*accept)(const PathTerms& terms, Handover offered);
};

// All kinds. Where several serve one reach, the setting `auto` takes the first.
std::span<const TransportKind> transport_kinds();

// Returns the row of that name. Errors: kUnsupported naming the rows that exist.
Result<const TransportKind*> find_kind(std::span<const TransportKind> kinds, std::string_view name);

// Makes a path of this kind within this process and sends one message each way, with both ends
// asleep in between. Blocks for at most two seconds. Errors say what this machine lacks.
Status try_kind(const TransportKind& kind);

// What every kind checks about the other end's handover before it uses any of it.

// Checks how many descriptors and bytes were brought, an encrypted connection counting as a
// descriptor. `what` is "offer" or "answer", for the message. Errors: kProtocol where either number
// differs.
inline Status check_handover(const TransportKind& kind, const char* what, const Handover& found,
                             size_t num_descriptors, size_t num_bytes = 0) {
  const size_t num_found = found.descriptors.size() + (found.secured != nullptr ? 1 : 0);
  const bool may_be_secured = found.secured == nullptr || kind.is_dialled;
  if (may_be_secured && num_found == num_descriptors && found.bytes.size() == num_bytes)
    return ok();
  return Error{ErrorCode::kProtocol, std::string("transport ") + kind.name + ": its " + what +
                                         " brought " + std::to_string(num_found) +
                                         " descriptors and " + std::to_string(found.bytes.size()) +
                                         " bytes; it has " + std::to_string(num_descriptors) +
                                         " and " + std::to_string(num_bytes)};
}

}  // namespace dflash::transport
