// A sealed memfd segment: the writer's half of a shared-memory channel. Its owner maps it
// read-write and then seals it against growth, shrinking and future writable mappings. The peer can
// therefore only map it read-only, and neither side can be killed by SIGBUS. Nothing has a name in
// any file system.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "base/owned_fd.h"
#include "base/result.h"
#include "transport/channel.h"

namespace dflash::transport {

// Owns its descriptor and its mapping; a moved-from segment has neither.
class Segment {
 public:
  // Creates a segment, allocates its pages (with posix_fallocate, so that a lack of memory is an
  // error here and not a signal later), maps and seals it. `is_open` leaves out the seal against
  // future writable mappings, for a peer whose device registers no read-only memory. Such a peer
  // can write to its partner's words, so this is allowed only between a host and a worker that the
  // host started itself. Errors: kInvalidArgument, kOutOfMemory, kSystem.
  static Result<Segment> create(Side side, const SlotGeometry& geometry, uint64_t generation,
                                bool is_open = false);
  // Maps a peer's segment after checking its seals, size, magic, version, generation and geometry
  // against those agreed. The mapping is read-only unless `is_open`, which devices need. Errors:
  // kProtocol naming what does not fit; kSystem, kOutOfMemory.
  static Result<Segment> attach(OwnedFd fd, Side writer, const SlotGeometry& geometry,
                                uint64_t generation, bool is_open = false);

  Segment(Segment&&) noexcept;
  Segment& operator=(Segment&&) noexcept;
  ~Segment();

  int fd() const { return fd_.get(); }
  std::byte* base() const { return base_; }
  size_t mapped_bytes() const { return mapped_bytes_; }
  bool is_writable() const { return is_writable_; }

 private:
  Segment() = default;
  OwnedFd fd_;
  std::byte* base_ = nullptr;
  size_t mapped_bytes_ = 0;
  bool is_writable_ = false;
};

// Makes the channel of two segments: `own` is written by `side`, `peer` by the other. `host_bell`
// is an eventfd that the worker rings when the host sleeps in poll(). The host passes it along with
// its segment, so that each side holds a duplicate.
Result<std::unique_ptr<Channel>> make_shared_channel(Side side, const SlotGeometry& geometry,
                                                     Segment own, Segment peer, OwnedFd host_bell);

}  // namespace dflash::transport
