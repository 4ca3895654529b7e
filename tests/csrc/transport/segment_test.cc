// Sealed segments: what attach() refuses, that the seals hold, and that a hostile writer can spoil
// its own data and nothing else.
// SPDX-License-Identifier: Apache-2.0
#include "transport/shared/segment.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <string>

#include "failed.h"
#include "transport/channel_kinds.h"
#include "transport/ring/layout.h"

namespace dflash::transport {
namespace {

using namespace testing;

constexpr SlotGeometry kSmall{4, 1024, 2048};

Error attach_error(int fd, Side writer, const SlotGeometry& geometry, uint64_t generation) {
  auto attached = Segment::attach(OwnedFd(fd), writer, geometry, generation);
  REQUIRE(!attached.ok());
  return attached.error();
}

TEST_CASE("a segment attaches with the agreed values and is read-only there") {
  const Segment own = take(Segment::create(Side::kHost, kSmall, kGeneration));
  const Segment view = attach(own, Side::kHost, kSmall);
  CHECK(view.mapped_bytes() == own.mapped_bytes());
  own.base()[5000] = std::byte{42};
  CHECK(view.base()[5000] == std::byte{42});
  CHECK(::mprotect(view.base(), view.mapped_bytes(), PROT_READ | PROT_WRITE) != 0);
}

TEST_CASE("the peer can neither resize the segment nor map it writable") {
  const Segment own = take(Segment::create(Side::kHost, kSmall, kGeneration));
  CHECK(::ftruncate(own.fd(), 0) != 0);
  CHECK(::ftruncate(own.fd(), 1 << 20) != 0);
  CHECK(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, own.fd(), 0) == MAP_FAILED);
  CHECK((::fcntl(own.fd(), F_GETFD) & FD_CLOEXEC) != 0);
}

TEST_CASE(
    "an open segment can be mapped writable and still not resized; what is sealed less than agreed "
    "is refused") {
  const Segment own = take(Segment::create(Side::kWorker, kSmall, kGeneration, true));
  CHECK(::ftruncate(own.fd(), 0) != 0);
  const Segment view =
      take(Segment::attach(OwnedFd(::dup(own.fd())), Side::kWorker, kSmall, kGeneration, true));
  CHECK(view.is_writable());
  CHECK(::mprotect(view.base(), view.mapped_bytes(), PROT_READ | PROT_WRITE) == 0);
  CHECK(attach_error(::dup(own.fd()), Side::kWorker, kSmall, kGeneration).message ==
        Has{"required: shrink, grow, future-write"});
  CHECK_FALSE(attach(take(Segment::create(Side::kHost, kSmall, kGeneration)), Side::kHost, kSmall)
                  .is_writable());
}

TEST_CASE("attach refuses every value that was not agreed, by name") {
  const Segment own = take(Segment::create(Side::kHost, kSmall, kGeneration));
  const auto refused = [&](Side writer, const SlotGeometry& geometry, uint64_t generation) {
    const Error error = attach_error(::dup(own.fd()), writer, geometry, generation);
    CHECK(error.code == ErrorCode::kProtocol);
    return error.message;
  };
  CHECK(refused(Side::kHost, kSmall, kGeneration + 1) == Has{"generation is 7"});
  CHECK(refused(Side::kHost, {8, 1024, 2048}, kGeneration) == Has{"size is"});
  // These need as many bytes, so only the header tells them apart.
  CHECK(refused(Side::kHost, {4, 1024, 4096}, kGeneration) == Has{"reply_bytes is 2048"});
  CHECK(refused(Side::kWorker, {4, 4096, 1024}, kGeneration) == Has{"writer is 0"});
}

TEST_CASE("attach refuses a memfd that is unsealed, half sealed, of the wrong size, or no memfd") {
  const auto layout = take(SegmentLayout::of(Side::kHost, kSmall));
  const auto memfd = [&](uint64_t bytes, int seals) {
    const int fd = ::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    REQUIRE(::ftruncate(fd, static_cast<off_t>(bytes)) == 0);
    if (seals != 0) REQUIRE(::fcntl(fd, F_ADD_SEALS, seals) == 0);
    return fd;
  };
  const int all = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
  const auto message = [&](int fd) {
    return attach_error(fd, Side::kHost, kSmall, kGeneration).message;
  };
  CHECK(message(memfd(layout.total_bytes, 0)) == Has{"seals are"});
  for (const int missing : {F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE, F_SEAL_SEAL}) {
    CHECK(message(memfd(layout.total_bytes, all & ~missing)) == Has{"seals are"});
  }
  CHECK(message(memfd(layout.total_bytes - 4096, all)) == Has{"size is"});
  CHECK(message(memfd(layout.total_bytes + 4096, all)) == Has{"size is"});
  CHECK(message(memfd(layout.total_bytes, all)) == Has{"magic is 0"});
  CHECK(message(::open("/dev/null", O_RDONLY | O_CLOEXEC)) == Has{"no memfd"});
  CHECK(message(-1) == Has{"no memfd"});
}

TEST_CASE("a channel refuses segments of another side or geometry") {
  Segment own = take(Segment::create(Side::kWorker, kSmall, kGeneration));
  const Segment peer_own = take(Segment::create(Side::kHost, kSmall, kGeneration));
  Segment peer = attach(peer_own, Side::kHost, kSmall);
  // The worker's segment handed in as the host's.
  CHECK(make_shared_channel(Side::kHost, kSmall, std::move(own), std::move(peer), OwnedFd())
            .error()
            .code == ErrorCode::kInvalidArgument);
}

// A worker that writes what it likes into its own segment, seen from the host's channel.
struct HostileWorker {
  Segment segment = take(Segment::create(Side::kWorker, kSmall, kGeneration));
  std::unique_ptr<Channel> host;

  HostileWorker() {
    host = take(make_shared_channel(Side::kHost, kSmall,
                                    take(Segment::create(Side::kHost, kSmall, kGeneration)),
                                    attach(segment, Side::kWorker, kSmall), OwnedFd()));
  }
  void store_u32(uint64_t offset, uint32_t value) {
    std::memcpy(segment.base() + offset, &value, sizeof value);
  }
  void store_u64(uint64_t offset, uint64_t value) {
    std::memcpy(segment.base() + offset, &value, sizeof value);
  }
};

TEST_CASE("a head, slot or length out of range is a protocol error and stays one") {
  struct Case {
    const char* named;
    uint32_t head, slot;
    uint64_t bytes;
  };
  const Case cases[] = {
      {"head is 5",                      2 * 5,   0,   0    },
      {"head is 2147483647",             ~0u - 1, 0,   0    },
      {"slot is 4",                      2,       4,   0    },
      {"slot is 4294967295",             2,       ~0u, 0    },
      {"length is 2049",                 2,       0,   2049 },
      {"length is 18446744073709551615", 2,       0,   ~0ull},
  };
  for (const Case& hostile : cases) {
    HostileWorker worker;
    worker.store_u32(kEntriesOffset, hostile.slot);
    worker.store_u64(kEntriesOffset + 8, hostile.bytes);
    worker.store_u32(kHeadOffset, hostile.head);
    for (int again = 0; again < 2; ++again) {
      const auto polled = worker.host->poll();
      REQUIRE_MESSAGE(!polled.ok(), hostile.named);
      CHECK(polled == Failed(ErrorCode::kProtocol, hostile.named));
      worker.store_u32(kHeadOffset, 0);
    }
  }
}

TEST_CASE(
    "random writes of a peer never crash or hang the reader and never yield bytes outside a slot") {
  std::mt19937 engine(5);
  const auto random = [&] { return static_cast<uint32_t>(engine()); };
  const auto layout = take(SegmentLayout::of(Side::kWorker, kSmall));
  for (int round = 0; round < 300; ++round) {
    HostileWorker worker;
    uint32_t head = 0;
    for (int step = 0; step < 50; ++step) {
      for (int i = 0; i < 8; ++i)
        worker.store_u32(kHeadOffset + 4 * (random() % 110),
                         random() % 3 == 0 ? random() : random() % 8);
      // Mostly plausible heads, or the first one would end every round.
      if (random() % 20 != 0) worker.store_u32(kHeadOffset, head += 2 * (random() % 3));
      const auto polled = worker.host->poll();
      if (!polled.ok()) {
        CHECK((polled.error().code == ErrorCode::kProtocol ||
               polled.error().code == ErrorCode::kWorkerLost));
        break;
      }
      if (polled.value()) {
        CHECK(polled.value()->slot < kSmall.num_slots);
        CHECK(polled.value()->bytes.size() <= layout.slot_bytes);
      }
      // Publishing looks at the peer's words too.
      const auto published = worker.host->publish(static_cast<uint32_t>(step) % 4, 8);
      CHECK((published.ok() || published.error().code == ErrorCode::kWorkerLost));
    }
  }
}

TEST_CASE("the header line is read once: what the peer writes there later changes nothing") {
  HostileWorker worker;
  std::memset(worker.segment.base(), 0xff, kLineBytes);
  worker.store_u64(kEntriesOffset + 8, 2048);
  worker.store_u32(kHeadOffset, 2);
  CHECK(take(worker.host->poll())->bytes.size() == 2048);
  CHECK(worker.host->outgoing(3).size() == 1024);
}

}  // namespace
}  // namespace dflash::transport
