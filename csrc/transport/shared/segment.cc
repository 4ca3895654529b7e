// Makes sealed memfd segments, and the shared-memory channel of two of them.
// SPDX-License-Identifier: Apache-2.0
#include "transport/shared/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <string>
#include <utility>

#include "base/result.h"
#include "transport/ring/layout.h"
#include "transport/ring/ring_channel.h"

namespace dflash::transport {
namespace {

// Under these seals nobody can change the size (which would raise SIGBUS) or map the memory
// writable from now on.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
int seals_of(bool is_open) { return is_open ? kSeals & ~F_SEAL_FUTURE_WRITE : kSeals; }

Error segment_error(const std::string& what, int error_number = errno) {
  return system_error("shared segment: " + what, error_number);
}

Status check_seals_and_size(int fd, uint64_t total_bytes, int wanted) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0)
    return Error{ErrorCode::kProtocol,
                 "shared segment: the descriptor is no memfd, so it cannot be sealed"};
  if ((seals & wanted) != wanted) {
    return Error{
        ErrorCode::kProtocol,
        "shared segment: seals are " + std::to_string(seals) + "; required: shrink, grow, " +
            ((wanted & F_SEAL_FUTURE_WRITE) != 0 ? "future-write and seal (" : "and seal (") +
            std::to_string(wanted) + ")"};
  }
  struct stat status{};
  if (::fstat(fd, &status) != 0) return segment_error("fstat");
  if (static_cast<uint64_t>(status.st_size) != total_bytes) {
    return Error{ErrorCode::kProtocol, "shared segment: size is " + std::to_string(status.st_size) +
                                           " bytes; the agreed geometry needs " +
                                           std::to_string(total_bytes)};
  }
  return ok();
}

struct BothSegments {
  Segment own, peer;
};

Side other(Side side) { return side == Side::kHost ? Side::kWorker : Side::kHost; }

}  // namespace

Result<Segment> Segment::create(Side side, const SlotGeometry& geometry, uint64_t generation,
                                bool is_open) {
  auto layout = SegmentLayout::of(side, geometry);
  if (!layout.ok()) return std::move(layout).error();
  const uint64_t total_bytes = layout.value().total_bytes;
  Segment segment;
  segment.fd_ = OwnedFd(::memfd_create("dflash_moe", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!segment.fd_.is_open()) return segment_error("memfd_create");
  if (const int failure = ::posix_fallocate(segment.fd_.get(), 0, static_cast<off_t>(total_bytes));
      failure != 0) {
    return segment_error("allocating " + std::to_string(total_bytes) + " bytes", failure);
  }
  void* const base = ::mmap(nullptr, total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                            segment.fd_.get(), 0);
  if (base == MAP_FAILED) return segment_error("mapping " + std::to_string(total_bytes) + " bytes");
  segment.base_ = static_cast<std::byte*>(base);
  segment.mapped_bytes_ = total_bytes;
  write_segment_header(segment.base_, side, geometry, generation);
  if (::fcntl(segment.fd_.get(), F_ADD_SEALS, seals_of(is_open)) != 0)
    return segment_error("sealing (needs Linux 5.1)");
  segment.is_writable_ = true;
  return segment;
}

Result<Segment> Segment::attach(OwnedFd fd, Side writer, const SlotGeometry& geometry,
                                uint64_t generation, bool is_open) {
  auto layout = SegmentLayout::of(writer, geometry);
  if (!layout.ok()) return std::move(layout).error();
  const uint64_t total_bytes = layout.value().total_bytes;
  // This comes before mmap: afterwards the peer could still shrink an unsealed file under the
  // mapping.
  DFLASH_TRY(check_seals_and_size(fd.get(), total_bytes, seals_of(is_open)));
  void* const base = ::mmap(nullptr, total_bytes, is_open ? PROT_READ | PROT_WRITE : PROT_READ,
                            MAP_SHARED | MAP_POPULATE, fd.get(), 0);
  if (base == MAP_FAILED)
    return segment_error("mapping the peer's " + std::to_string(total_bytes) + " bytes");
  Segment segment;
  segment.fd_ = std::move(fd);
  segment.base_ = static_cast<std::byte*>(base);
  segment.mapped_bytes_ = total_bytes;
  segment.is_writable_ = is_open;
  DFLASH_TRY(check_segment_header(segment.base_, writer, geometry, generation));
  return segment;
}

Segment::Segment(Segment&& moved) noexcept
    : fd_(std::move(moved.fd_)),
      base_(std::exchange(moved.base_, nullptr)),
      mapped_bytes_(std::exchange(moved.mapped_bytes_, 0)),
      is_writable_(moved.is_writable_) {}

Segment& Segment::operator=(Segment&& moved) noexcept {
  std::swap(fd_, moved.fd_);
  std::swap(base_, moved.base_);
  std::swap(mapped_bytes_, moved.mapped_bytes_);
  std::swap(is_writable_, moved.is_writable_);
  return *this;
}

Segment::~Segment() {
  if (base_ != nullptr) ::munmap(base_, mapped_bytes_);
}

Result<std::unique_ptr<Channel>> make_shared_channel(Side side, const SlotGeometry& geometry,
                                                     Segment own, Segment peer, OwnedFd host_bell) {
  auto out = SegmentLayout::of(side, geometry);
  if (!out.ok()) return std::move(out).error();
  auto in = SegmentLayout::of(other(side), geometry);
  if (!in.ok()) return std::move(in).error();
  if (own.mapped_bytes() != out.value().total_bytes ||
      peer.mapped_bytes() != in.value().total_bytes) {
    return Error{ErrorCode::kInvalidArgument, "shared channel: the segments are of " +
                                                  std::to_string(own.mapped_bytes()) + " and " +
                                                  std::to_string(peer.mapped_bytes()) +
                                                  " bytes; this side and geometry need " +
                                                  std::to_string(out.value().total_bytes) +
                                                  " and " + std::to_string(in.value().total_bytes)};
  }
  if (host_bell.is_open()) {
    // Neither ringing nor draining the bell may ever block. The flag belongs to the bell, so that
    // both sides' duplicates share it.
    const int flags = ::fcntl(host_bell.get(), F_GETFL);
    if (flags < 0 || ::fcntl(host_bell.get(), F_SETFL, flags | O_NONBLOCK) != 0)
      return segment_error("the host's bell");
  }
  auto memory = std::make_shared<BothSegments>(BothSegments{std::move(own), std::move(peer)});
  RingEnds ends{side,
                geometry,
                "shared",
                memory->own.base(),
                memory->peer.base(),
                memory->peer.is_writable(),
                memory,
                OwnedFd(),
                OwnedFd()};
  (side == Side::kHost ? ends.own_bell : ends.peer_bell) = std::move(host_bell);
  return make_ring_channel(std::move(ends));
}

}  // namespace dflash::transport
