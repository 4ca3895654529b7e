// What encryption adds to a connection: who gets in, what a changed byte does, and bytes that wait
// where no descriptor tells of them.
// SPDX-License-Identifier: Apache-2.0
#include "transport/secure/secure_socket.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "failed.h"
#include "transport/channel_kinds.h"
#include "transport/secure/relay.h"
#include "transport/secure_pair.h"

namespace dflash::transport {
namespace {

using namespace testing;

bool is_readable_now(int fd, int timeout_ms = 0) {
  pollfd awaited{fd, POLLIN, 0};
  return ::poll(&awaited, 1, timeout_ms) > 0;
}

size_t send_all(SecureSocket& socket, std::span<const std::byte> bytes) {
  const iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
  return take(socket.send({&piece, 1}));
}

Result<size_t> receive_some(SecureSocket& socket, std::span<std::byte> bytes) {
  const iovec piece{bytes.data(), bytes.size()};
  return socket.receive({&piece, 1});
}

std::string text_of(const Result<bool>& ended) {
  REQUIRE(ended == Failed(ErrorCode::kProtocol));
  return ended.error().message;
}

Outcome shake(PresharedKey offered, PresharedKey known) {
  auto ends = tcp_sockets();
  const auto dialling =
      secure_end(SecureSide::kDialling, std::move(ends.first), std::move(offered));
  const auto accepting =
      secure_end(SecureSide::kAccepting, std::move(ends.second), std::move(known));
  return shake_hands(*dialling, *accepting);
}

TEST_CASE("both ends of a connection know the same binding and identity, two connections do not") {
  const SecurePair first = secure_pair(), second = secure_pair();
  CHECK(take(first.first->channel_binding()) == take(first.second->channel_binding()));
  CHECK(take(first.first->channel_binding()) != take(second.first->channel_binding()));
  CHECK(first.first->identity() == "data w0");
  CHECK(first.second->identity() == "data w0");
}

TEST_CASE("a peer with another key is refused, and each end says that it is the key") {
  const Outcome outcome = shake(key_named("data w0", 1), key_named("data w0", 2));
  CHECK(text_of(outcome.dialling) == Has{"another key"});
  CHECK(text_of(outcome.accepting) == Has{"another key"});
}

TEST_CASE("a peer of another role or name is refused, and the accepting end says which") {
  for (const char* asked : {"pulse w0", "data w1", "data w", "data w00"}) {
    const Outcome outcome = shake(key_named(asked), key_named("data w0"));
    CHECK(text_of(outcome.dialling) == Has{"role and worker name"});
    CHECK(text_of(outcome.accepting) == Has{asked});
  }
}

TEST_CASE("two dialling ends never come to terms: a handshake cannot be reflected") {
  auto ends = tcp_sockets();
  const auto one = secure_end(SecureSide::kDialling, std::move(ends.first), key_named("data w0"));
  const auto other =
      secure_end(SecureSide::kDialling, std::move(ends.second), key_named("data w0"));
  const Outcome outcome = shake_hands(*one, *other);
  CHECK(!outcome.dialling.ok());
  CHECK(!outcome.accepting.ok());
}

TEST_CASE("a peer that answers without TLS is a protocol error that names the setting") {
  auto ends = tcp_sockets();
  const auto dialling =
      secure_end(SecureSide::kDialling, std::move(ends.first), key_named("data w0"));
  CHECK(!take(dialling->handshake()));
  const char answer[] = "\x20\0\0\0 a frame of the plain protocol";
  REQUIRE(::send(ends.second.get(), answer, sizeof answer, 0) > 0);
  REQUIRE(is_readable_now(dialling->fd(), 10'000));
  CHECK(text_of(dialling->handshake()) == Has{"ipc.encryption"});
}

TEST_CASE("a hang-up in the handshake is a lost worker") {
  auto ends = tcp_sockets();
  const auto dialling =
      secure_end(SecureSide::kDialling, std::move(ends.first), key_named("data w0"));
  CHECK(!take(dialling->handshake()));
  ends.second.close();
  REQUIRE(is_readable_now(dialling->fd(), 10'000));
  CHECK(dialling->handshake() == Failed(ErrorCode::kWorkerLost));
}

// The descriptor is silent after the first piece, and the rest of the record is not lost.
TEST_CASE("a record larger than the read buffer, then silence, is read to its end") {
  const SecurePair pair = secure_pair();
  std::vector<std::byte> sent(kRecordBytes);
  fill(sent, 5);
  REQUIRE(send_all(*pair.first, sent) == sent.size());
  std::vector<std::byte> received(sent.size());
  size_t at = 0;
  constexpr size_t kPiece = 1000;
  while (at < received.size()) {
    REQUIRE((pair.second->has_pending() || is_readable_now(pair.second->fd(), 10'000)));
    const auto room = std::span(received).subspan(at).first(std::min(kPiece, received.size() - at));
    at += take(receive_some(*pair.second, room));
    if (at > 0 && at < received.size()) {
      CHECK(pair.second->has_pending());
      CHECK(!is_readable_now(pair.second->fd()));
    }
  }
  CHECK(is_filled_with(received, 5));
  CHECK(take(receive_some(*pair.second, received)) == 0);
  CHECK(!pair.second->has_pending());
}

// The same through the channel: the message's rest lies in libssl while the waiter would sleep.
TEST_CASE("a waiter does not sleep on a channel while decrypted bytes wait") {
  constexpr SlotGeometry kMany{64, 1024, 1024};
  const ChannelPair pair = Tls::make(kMany);
  for (uint32_t slot = 0; slot < kMany.num_slots; ++slot) {
    fill(pair.host->outgoing(slot), slot);
    REQUIRE(pair.host->publish(slot, kMany.request_bytes).ok());
  }
  for (uint32_t slot = 0; slot < kMany.num_slots; ++slot) {
    const Arrival arrival = receive(*pair.worker);
    CHECK(arrival.slot == slot);
    CHECK(is_filled_with(arrival.bytes, slot));
  }
}

TEST_CASE("what the kernel has no room for leaves later, in order") {
  const SecurePair pair = secure_pair();
  std::vector<std::byte> sent(16 << 20);
  fill(sent, 9);
  std::vector<std::byte> received(sent.size());
  size_t num_sent = 0, num_received = 0;
  bool was_full = false;
  const Deadline deadline = Deadline::after_ms(60'000);
  while (num_received < received.size() && !deadline.has_passed()) {
    if (num_sent < sent.size()) {
      const size_t taken = send_all(*pair.first, std::span(sent).subspan(num_sent));
      was_full = was_full || taken == 0;
      num_sent += taken;
      if (taken > 0) continue;
    }
    REQUIRE(pair.first->flush().ok());
    num_received += take(receive_some(*pair.second, std::span(received).subspan(num_received)));
  }
  CHECK(was_full);
  CHECK(is_filled_with(received, 9));
}

TEST_CASE("keys are renewed, and a connection outlives many of them") {
  const SecurePair pair = secure_pair({.records_per_key = 3});
  std::vector<std::byte> sent(100), received(100);
  for (uint64_t round = 0; round < 500; ++round) {
    SecureSocket& from = round % 2 == 0 ? *pair.first : *pair.second;
    SecureSocket& to = round % 2 == 0 ? *pair.second : *pair.first;
    fill(sent, round);
    REQUIRE(send_all(from, sent) == sent.size());
    size_t at = 0;
    while (at < received.size()) {
      REQUIRE((to.has_pending() || is_readable_now(to.fd(), 10'000)));
      at += take(receive_some(to, std::span(received).subspan(at)));
    }
    REQUIRE(is_filled_with(received, round));
  }
}

// Somebody on the path, who has the descriptors of both connections in between.
struct Tampered {
  std::unique_ptr<SecureSocket> dialling, accepting;
  OwnedFd near, far;  // the ends of whoever is on the path

  Tampered() {
    auto left = tcp_sockets(), right = tcp_sockets();
    near = std::move(left.second);
    far = std::move(right.first);
    dialling = secure_end(SecureSide::kDialling, std::move(left.first), key_named("data w0"));
    accepting = secure_end(SecureSide::kAccepting, std::move(right.second), key_named("data w0"));
  }
  // Passes on what waits in each direction.
  void pass() {
    for (const auto& [from, to] : {
             std::pair(near.get(), far.get()), {far.get(), near.get()}
    })
      forward(from, to, SIZE_MAX, 0);
  }
  // Passes on what waits from one end to the other, with a bit of one byte flipped. Returns the
  // number of bytes.
  static size_t forward(int from, int to, size_t flipped, unsigned bit) {
    std::byte bytes[64 << 10];
    const ssize_t got = ::recv(from, bytes, sizeof bytes, MSG_DONTWAIT);
    if (got <= 0) return 0;
    const auto count = static_cast<size_t>(got);
    if (flipped != SIZE_MAX) bytes[flipped % count] ^= static_cast<std::byte>(1u << bit);
    REQUIRE(::send(to, bytes, count, MSG_NOSIGNAL) == got);
    return count;
  }
};

TEST_CASE("any flipped bit of a record ends the connection, and none of its bytes come out") {
  std::mt19937 engine(11);
  for (int round = 0; round < 200; ++round) {
    Tampered path;
    const Deadline deadline = Deadline::after_ms(10'000);
    bool is_done = false;
    while (!is_done) {
      const bool dialled = take(path.dialling->handshake());
      path.pass();
      is_done = take(path.accepting->handshake()) && dialled;
      path.pass();
      REQUIRE(!deadline.has_passed());
    }
    std::vector<std::byte> sent(1 + engine() % 5000);
    fill(sent, static_cast<uint64_t>(round));
    REQUIRE(send_all(*path.dialling, sent) == sent.size());
    REQUIRE(is_readable_now(path.near.get(), 10'000));
    REQUIRE(Tampered::forward(path.near.get(), path.far.get(), engine(), engine() % 8) > 0);
    path.far.close();  // so that a length which was made larger is not awaited for ever
    std::vector<std::byte> received(8000);
    auto outcome = Result<size_t>(size_t{0});
    while (outcome.ok() && outcome.value() == 0) {
      REQUIRE((path.accepting->has_pending() || is_readable_now(path.accepting->fd(), 10'000)));
      outcome = receive_some(*path.accepting, received);
    }
    CHECK_MESSAGE(!outcome.ok(), "bytes came out of a changed record");
  }
}

TEST_CASE("a record that is sent twice ends the connection") {
  Tampered path;
  const Deadline deadline = Deadline::after_ms(10'000);
  bool is_done = false;
  while (!is_done) {
    const bool dialled = take(path.dialling->handshake());
    path.pass();
    is_done = take(path.accepting->handshake()) && dialled;
    path.pass();
    REQUIRE(!deadline.has_passed());
  }
  std::vector<std::byte> sent(50), received(50);
  fill(sent, 3);
  REQUIRE(send_all(*path.dialling, sent) == sent.size());
  REQUIRE(is_readable_now(path.near.get(), 10'000));
  std::byte record[4096];
  const ssize_t size = ::recv(path.near.get(), record, sizeof record, 0);
  REQUIRE(size > 0);
  REQUIRE(::send(path.far.get(), record, static_cast<size_t>(size), 0) == size);
  REQUIRE(is_readable_now(path.accepting->fd(), 10'000));
  REQUIRE(take(receive_some(*path.accepting, received)) == sent.size());
  REQUIRE(::send(path.far.get(), record, static_cast<size_t>(size), 0) == size);
  REQUIRE(is_readable_now(path.accepting->fd(), 10'000));
  CHECK(receive_some(*path.accepting, received) == Failed(ErrorCode::kProtocol));
}

TEST_CASE("libssl of another name or major is refused by name, with the package and the setting") {
  for (const char* name : {"libssl.so.none", "libc.so.6"}) {
    const auto loaded = load_libssl(name);
    REQUIRE(loaded == Failed(ErrorCode::kUnsupported));
    for (const char* word : {name, "libssl3", "ipc.encryption: off"})
      CHECK_MESSAGE(loaded.error().message.find(word) != std::string::npos, loaded.error().message);
  }
}

TEST_CASE("a relay carries both directions and hangs up with either end") {
  for (const bool from_far : {false, true}) {
    SecurePair pair = secure_pair();
    auto relay = take(Relay::start(std::move(pair.first)));
    OwnedFd plain = relay->take_plain();
    std::vector<std::byte> sent(3 << 20), received(sent.size());
    fill(sent, 4);
    std::thread writer([&] {
      size_t at = 0;
      while (at < sent.size()) {
        const ssize_t taken = ::send(plain.get(), sent.data() + at, sent.size() - at, MSG_NOSIGNAL);
        REQUIRE(taken > 0);
        at += static_cast<size_t>(taken);
      }
    });
    size_t at = 0;
    while (at < received.size()) {
      REQUIRE((pair.second->has_pending() || is_readable_now(pair.second->fd(), 10'000)));
      at += take(receive_some(*pair.second, std::span(received).subspan(at)));
    }
    writer.join();
    CHECK(is_filled_with(received, 4));
    REQUIRE(send_all(*pair.second, std::span(sent).first(70)) == 70);
    REQUIRE(is_readable_now(plain.get(), 10'000));
    CHECK(::recv(plain.get(), received.data(), 100, 0) == 70);
    if (from_far) {
      pair.second.reset();
      REQUIRE(is_readable_now(plain.get(), 10'000));
      CHECK(::recv(plain.get(), received.data(), 100, 0) == 0);
    } else {
      plain.close();
      REQUIRE(is_readable_now(pair.second->fd(), 10'000));
      CHECK(receive_some(*pair.second, received).error().code == ErrorCode::kWorkerLost);
    }
  }
}

}  // namespace
}  // namespace dflash::transport
