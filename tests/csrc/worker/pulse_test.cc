// The heartbeat: what it says, that a host which does not read cannot block it, and that it ends.
// SPDX-License-Identifier: Apache-2.0
#include "worker/pulse.h"

#include <doctest/doctest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <utility>

#include "base/clock.h"
#include "wire/frame.h"
#include "wire/little_endian.h"

namespace dflash::worker {
namespace {

std::pair<OwnedFd, OwnedFd> socket_pair() {
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  return {OwnedFd(ends[0]), OwnedFd(ends[1])};
}

// Reads `count` bytes within 20 s; returns how many came.
size_t read_bytes(int fd, std::span<std::byte> out) {
  const Deadline deadline = Deadline::after_ms(20'000);
  size_t got = 0;
  while (got < out.size() && !deadline.has_passed()) {
    pollfd awaited{fd, POLLIN, 0};
    ::poll(&awaited, 1, 100);
    const ssize_t count = ::recv(fd, out.data() + got, out.size() - got, MSG_DONTWAIT);
    if (count == 0) break;
    if (count > 0) got += static_cast<size_t>(count);
  }
  return got;
}

TEST_CASE("pulses carry magic, version and the counter as it moves") {
  auto [worker_end, host_end] = socket_pair();
  std::atomic<uint64_t> counter{5};
  Pulse pulse(counter);
  REQUIRE(pulse.start(std::move(worker_end)).ok());
  std::array<std::byte, wire::kPulseBytes> message;
  REQUIRE(read_bytes(host_end.get(), message) == message.size());
  CHECK(wire::load_le<uint32_t>(message, 0) == wire::kPulseMagic);
  CHECK(wire::load_le<uint32_t>(message, 4) == wire::kPulseVersion);
  CHECK(wire::load_le<uint64_t>(message, 8) == 5);
  counter = uint64_t{1} << 40;
  uint64_t seen = 5;
  while (seen == 5 && read_bytes(host_end.get(), message) == message.size())
    seen = wire::load_le<uint64_t>(message, 8);
  CHECK(seen == uint64_t{1} << 40);
}

TEST_CASE("a host that never reads does not block the pulse's end, and pulses stay whole") {
  auto [worker_end, host_end] = socket_pair();
  const int smallest = 1;
  REQUIRE(::setsockopt(worker_end.get(), SOL_SOCKET, SO_SNDBUF, &smallest, sizeof smallest) == 0);
  // Fill the socket beforehand, so that the first pulse already meets a full one.
  std::array<std::byte, wire::kPulseBytes> filler{};
  wire::encode_pulse(77, filler);
  while (::send(worker_end.get(), filler.data(), filler.size(), MSG_DONTWAIT) > 0) {
  }
  std::atomic<uint64_t> counter{78};
  Pulse pulse(counter);
  REQUIRE(pulse.start(std::move(worker_end)).ok());
  std::array<std::byte, wire::kPulseBytes> message;
  uint64_t seen = 77;
  while (seen == 77 && read_bytes(host_end.get(), message) == message.size()) {
    REQUIRE(wire::load_le<uint32_t>(message, 0) == wire::kPulseMagic);
    seen = wire::load_le<uint64_t>(message, 8);
  }
  CHECK(seen == 78);
  const int64_t before_ns = now_ns();
  pulse.stop();
  CHECK(now_ns() - before_ns < 20'000'000'000);  // it ends at all, also on a busy machine
}

TEST_CASE("stopping or replacing a pulse closes its socket, which the host sees as a hang-up") {
  auto [worker_end, host_end] = socket_pair();
  auto [second_worker_end, second_host_end] = socket_pair();
  std::atomic<uint64_t> counter{0};
  Pulse pulse(counter);
  REQUIRE(pulse.start(std::move(worker_end)).ok());
  REQUIRE(pulse.start(std::move(second_worker_end)).ok());
  std::array<std::byte, 4096> rest;
  CHECK(read_bytes(host_end.get(), rest) < rest.size());  // ended by the hang-up
  std::array<std::byte, wire::kPulseBytes> message;
  CHECK(read_bytes(second_host_end.get(), message) == message.size());
  pulse.stop();
  CHECK(read_bytes(second_host_end.get(), rest) < rest.size());
}

TEST_CASE("a pulse without a socket is refused") {
  std::atomic<uint64_t> counter{0};
  Pulse pulse(counter);
  CHECK(!pulse.start(OwnedFd()).ok());
}

}  // namespace
}  // namespace dflash::worker
