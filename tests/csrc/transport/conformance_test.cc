// What every transport owes its users (transport/channel.h), run against each of them and each
// behind an emulated link.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "transport/channel_kinds.h"

namespace dflash::transport {
namespace {

using namespace testing;

constexpr SlotGeometry kSmall{4, 1024, 2048};

// Sanitizers run these loops some 20 times slower.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kSleepRounds = 2'000;
constexpr int kLitmusRounds = 10'000;
constexpr size_t kBulkBytes = 8u << 20;
#else
constexpr int kSleepRounds = 20'000;
constexpr int kLitmusRounds = 200'000;
constexpr size_t kBulkBytes = 64u << 20;
#endif

TEST_CASE_TEMPLATE("a channel says its kind and geometry and aligns its slots", Kind,
                   DFLASH_EVERY_KIND) {
  const ChannelPair pair = Kind::make(kSmall);
  CHECK(std::string(pair.host->kind()) == Kind::kKind);
  CHECK(std::string(pair.worker->kind()) == Kind::kKind);
  for (uint32_t slot = 0; slot < kSmall.num_slots; ++slot) {
    CHECK(pair.host->outgoing(slot).size() == kSmall.request_bytes);
    CHECK(pair.worker->outgoing(slot).size() == kSmall.reply_bytes);
    CHECK(reinterpret_cast<uintptr_t>(pair.host->outgoing(slot).data()) % 64 == 0);
    CHECK(reinterpret_cast<uintptr_t>(pair.worker->outgoing(slot).data()) % 64 == 0);
  }
}

TEST_CASE_TEMPLATE(
    "messages of every size arrive intact and in order, in every slot and both directions", Kind,
    DFLASH_EVERY_KIND) {
  const ChannelPair pair = Kind::make(kSmall);
  uint64_t seed = 0;
  for (const size_t bytes : {0u, 1u, 63u, 64u, 65u, 1000u, 1024u}) {
    for (Channel* sender : {pair.host.get(), pair.worker.get()}) {
      Channel& receiver = sender == pair.host.get() ? *pair.worker : *pair.host;
      const uint32_t order[] = {2, 0, 3, 1};
      for (const uint32_t slot : order) {
        fill(sender->outgoing(slot).first(bytes), seed + slot);
        REQUIRE(sender->publish(slot, bytes).ok());
      }
      for (const uint32_t slot : order) {
        const Arrival arrival = receive(receiver);
        CHECK(arrival.slot == slot);
        CHECK(arrival.bytes.size() == bytes);
        CHECK(is_filled_with(arrival.bytes, seed + slot));
      }
      seed += 10;
    }
  }
  CHECK(!take(pair.host->poll()).has_value());
  CHECK(!take(pair.worker->poll()).has_value());
}

TEST_CASE_TEMPLATE("one slot and the largest number of slots work", Kind, DFLASH_EVERY_KIND) {
  for (const uint32_t num_slots : {1u, 3u, kMaxSlots}) {
    const ChannelPair pair = Kind::make({num_slots, 64, 64});
    for (int lap = 0; lap < 3; ++lap) {
      for (uint32_t slot = 0; slot < num_slots; ++slot) {
        fill(pair.host->outgoing(slot), slot);
        REQUIRE(pair.host->publish(slot, 64).ok());
      }
      for (uint32_t slot = 0; slot < num_slots; ++slot) {
        const Arrival arrival = receive(*pair.worker);
        CHECK(arrival.slot == slot);
        CHECK(is_filled_with(arrival.bytes, slot));
      }
    }
  }
}

TEST_CASE_TEMPLATE("a geometry out of its limits is refused", Kind, Loopback) {
  for (const SlotGeometry& wrong : {
           SlotGeometry{0,             64, 64                },
           SlotGeometry{kMaxSlots + 1, 64, 64                },
           SlotGeometry{1,             0,  64                },
           SlotGeometry{1,             65, 64                },
           SlotGeometry{1,             64, kMaxSlotBytes + 64}
  }) {
    CHECK(make_loopback(wrong).error().code == ErrorCode::kInvalidArgument);
    CHECK(Segment::create(Side::kHost, wrong, 1).error().code == ErrorCode::kInvalidArgument);
    CHECK(make_stream_channel(Side::kHost, wrong, unix_sockets().first, {}).error().code ==
          ErrorCode::kInvalidArgument);
  }
}

TEST_CASE_TEMPLATE("a slot or length out of range is refused and the channel stays usable", Kind,
                   DFLASH_EVERY_KIND) {
  const ChannelPair pair = Kind::make(kSmall);
  CHECK(pair.host->publish(kSmall.num_slots, 1).error().code == ErrorCode::kInvalidArgument);
  CHECK(pair.host->publish(~0u, 1).error().code == ErrorCode::kInvalidArgument);
  CHECK(pair.host->publish(0, kSmall.request_bytes + 1).error().code ==
        ErrorCode::kInvalidArgument);
  CHECK(pair.worker->publish(0, kSmall.reply_bytes + 1).error().code ==
        ErrorCode::kInvalidArgument);
  CHECK(!take(pair.worker->poll()).has_value());
  REQUIRE(pair.host->publish(1, 5).ok());
  CHECK(receive(*pair.worker).slot == 1);
}

TEST_CASE_TEMPLATE("bulk both ways at once finishes without a deadlock", Kind, DFLASH_EVERY_KIND) {
  const ChannelPair pair = Kind::make({1, kBulkBytes, kBulkBytes});
  fill(pair.host->outgoing(0), 1);
  fill(pair.worker->outgoing(0), 2);
  std::atomic<int> num_received = 0;
  // Each end goes on waiting until both have their message: waiting is what sends the rest of its
  // own.
  const auto exchange = [&](Channel& channel, uint64_t awaited_seed) {
    CHECK(channel.publish(0, kBulkBytes).ok());
    CHECK(is_filled_with(receive(channel).bytes, awaited_seed));
    ++num_received;
    const Deadline deadline = Deadline::after_ms(10'000);
    while (num_received < 2 && !deadline.has_passed()) {
      WaitEntry entry;
      entry.channel = &channel;
      wait_any({&entry, 1}, Deadline::after_ms(1), 0);
    }
  };
  std::thread worker([&] { exchange(*pair.worker, 1); });
  exchange(*pair.host, 2);
  worker.join();
}

TEST_CASE_TEMPLATE("a closed peer is lost after its last message, for receiver and sender", Kind,
                   DFLASH_EVERY_KIND) {
  ChannelPair pair = Kind::make(kSmall);
  REQUIRE(pair.worker->publish(2, 10).ok());
  pair.worker.reset();
  CHECK(receive(*pair.host).slot == 2);
  CHECK(receive_error(*pair.host).code == ErrorCode::kWorkerLost);
  // A link tells at the latest when the message comes out of it.
  if (pair.host->publish(0, 10).ok())
    CHECK(receive_error(*pair.host).code == ErrorCode::kWorkerLost);
  CHECK(pair.host->poll().error().code == ErrorCode::kWorkerLost);
}

TEST_CASE_TEMPLATE("a sleeper is woken when its peer closes", Kind, DFLASH_EVERY_KIND) {
  ChannelPair pair = Kind::make(kSmall);
  std::atomic<bool> started = false;
  std::thread sleeper([&] {
    started = true;
    CHECK(receive_error(*pair.worker).code == ErrorCode::kWorkerLost);
  });
  while (!started) std::this_thread::yield();
  pair.host.reset();
  sleeper.join();
}

// Both ends sleep before almost every message; a lost wake-up ends in the ten-second deadline of
// receive().
void ping_pong(Channel& host, Channel& worker, int rounds, int64_t host_spin_ns, int host_wake_fd) {
  std::thread echo([&] {
    for (int round = 0; round < rounds; ++round) {
      const Arrival arrival = receive(worker);
      std::memcpy(worker.outgoing(arrival.slot).data(), arrival.bytes.data(), arrival.bytes.size());
      if (!worker.publish(arrival.slot, arrival.bytes.size()).ok()) return;
    }
  });
  int intact = 0;
  for (int round = 0; round < rounds; ++round) {
    const uint32_t slot = static_cast<uint32_t>(round) % host.geometry().num_slots;
    const size_t bytes = 8 + static_cast<size_t>(round) % 57;
    fill(host.outgoing(slot).first(bytes), static_cast<uint64_t>(round));
    if (!host.publish(slot, bytes).ok()) break;
    WaitEntry entry;
    entry.channel = &host;
    wait_any({&entry, 1}, Deadline::after_ms(10'000), host_spin_ns, host_wake_fd);
    if (!entry.arrival || entry.arrival->slot != slot || entry.arrival->bytes.size() != bytes)
      break;
    intact += is_filled_with(entry.arrival->bytes, static_cast<uint64_t>(round)) ? 1 : 0;
  }
  CHECK(intact == rounds);
  echo.join();
}

TEST_CASE_TEMPLATE("no wake-up is lost when both ends sleep", Kind, DFLASH_EVERY_KIND) {
  const ChannelPair pair = Kind::make({2, 64, 64});
  ping_pong(*pair.host, *pair.worker, kSleepRounds, 0, -1);
}

TEST_CASE_TEMPLATE("no wake-up is lost when the host sleeps on descriptors", Kind,
                   DFLASH_EVERY_KIND) {
  const ChannelPair pair = Kind::make({2, 64, 64});
  const OwnedFd never(::eventfd(0, EFD_CLOEXEC));
  ping_pong(*pair.host, *pair.worker, kSleepRounds / 4, 0, never.get());
}

TEST_CASE_TEMPLATE("no message is lost when a short spin often ends in sleep", Kind,
                   DFLASH_EVERY_KIND) {
  const ChannelPair pair = Kind::make({2, 64, 64});
  ping_pong(*pair.host, *pair.worker, kSleepRounds / 4, 3'000, -1);
}

// The Dekker pair of the ring, without the system calls that would hide a missing barrier: in every
// round one thread publishes while the other announces its sleep and looks once more. Either it
// finds the message or its bell has rung.
TEST_CASE_TEMPLATE("a publish and an announced sleep never miss each other", Kind, Loopback,
                   Shared) {
  const ChannelPair pair = Kind::make({2, 64, 64});
  constexpr int kStop = -1;
  std::atomic<int> started = 0, published = 0;
  // Spins, for the collision has to be close; gives way where there are fewer processors than
  // threads.
  const auto await = [](const std::atomic<int>& round, int value) {
    for (int turn = 1; round.load() != value && round.load() != kStop; ++turn) {
      if (turn % 4096 == 0) std::this_thread::yield();
    }
  };
  std::thread publisher([&] {
    for (int round = 1;; ++round) {
      await(started, round);
      if (started.load() == kStop ||
          !pair.worker->publish(static_cast<uint32_t>(round) % 2, 8).ok())
        break;
      published.store(round);
    }
  });
  int missed = 0;
  const Deadline deadline = Deadline::after_ms(2'000);
  for (int round = 1; round <= kLitmusRounds && !deadline.has_passed(); ++round) {
    started.store(round);
    // The publisher hears of the round about a cache line's transfer later; every delay around that
    // is tried.
    for (int delay = round % 256; delay > 0; --delay)
      std::atomic_signal_fence(std::memory_order_seq_cst);
    const WakeSource source = pair.host->arm(SleepKind::kPoll);
    const bool found = take(pair.host->poll()).has_value();
    await(published, round);
    pollfd bell{source.fd, POLLIN, 0};
    if (!found && ::poll(&bell, 1, 0) != 1) ++missed;
    pair.host->disarm();
    if (!found) CHECK(take(pair.host->poll()).has_value());
  }
  started.store(kStop);
  publisher.join();
  CHECK(missed == 0);
}

TEST_CASE_TEMPLATE("a wait ends at its deadline when nothing comes", Kind, DFLASH_EVERY_KIND) {
  const ChannelPair pair = Kind::make(kSmall);
  for (const int64_t spin_ns : {int64_t{0}, int64_t{1'000'000}}) {
    WaitEntry entry;
    entry.channel = pair.host.get();
    const int64_t start = now_ns();
    wait_any({&entry, 1}, Deadline::after_ms(20), spin_ns);
    CHECK(now_ns() - start >= 20'000'000);
    CHECK(now_ns() - start < 20'000'000'000);
    CHECK(!entry.arrival.has_value());
    CHECK(!entry.error.has_value());
  }
}

TEST_CASE_TEMPLATE("a wait ends when its wake descriptor is readable, spinning or asleep", Kind,
                   DFLASH_EVERY_KIND) {
  const ChannelPair pair = Kind::make(kSmall);
  for (const int64_t spin_ns : {int64_t{0}, int64_t{50'000'000'000}}) {
    for (Channel* channel : {pair.host.get(), pair.worker.get()}) {
      const OwnedFd wake(::eventfd(0, EFD_CLOEXEC));
      std::thread waker([&] {
        const uint64_t one = 1;
        CHECK(::write(wake.get(), &one, sizeof one) == sizeof one);
      });
      WaitEntry entry;
      entry.channel = channel;
      const int64_t start = now_ns();
      wait_any({&entry, 1}, Deadline::after_ms(60'000), spin_ns, wake.get());
      CHECK(now_ns() - start < 30'000'000'000);
      CHECK(!entry.arrival.has_value());
      waker.join();
    }
  }
}

TEST_CASE_TEMPLATE("a quiet time is slept through, and ends with whatever a wait ends with", Kind,
                   DFLASH_EVERY_KIND) {
  const ChannelPair pair = Kind::make(kSmall);
  constexpr int64_t kSpinNs = 1'000'000;
  const auto far = [] { return now_ns() + 60'000'000'000; };
  WaitEntry entry;
  entry.channel = pair.host.get();
  SUBCASE("a message") {
    std::thread publisher([&] { CHECK(pair.worker->publish(2, 5).ok()); });
    const int64_t start = now_ns();
    wait_any({&entry, 1}, Deadline::at_ns(far()), kSpinNs, -1, far());
    publisher.join();
    CHECK(now_ns() - start < 30'000'000'000);
    REQUIRE(entry.arrival.has_value());
    CHECK(entry.arrival->slot == 2);
  }
  SUBCASE("the wake descriptor") {
    const OwnedFd wake(::eventfd(1, EFD_CLOEXEC));
    const int64_t start = now_ns();
    wait_any({&entry, 1}, Deadline::at_ns(far()), kSpinNs, wake.get(), far());
    CHECK(now_ns() - start < 30'000'000'000);
    CHECK(!entry.arrival.has_value());
  }
  SUBCASE("the deadline, which may come first") {
    const int64_t start = now_ns();
    wait_any({&entry, 1}, Deadline::after_ms(20), kSpinNs, -1, far());
    CHECK(now_ns() - start >= 20'000'000);
    CHECK(now_ns() - start < 20'000'000'000);
    CHECK(!entry.arrival.has_value());
  }
  SUBCASE("or it passes, and the wait goes on") {
    std::thread publisher([&] {
      ::usleep(30'000);
      CHECK(pair.worker->publish(1, 5).ok());
    });
    wait_any({&entry, 1}, Deadline::at_ns(far()), kSpinNs, -1, now_ns() + 5'000'000);
    publisher.join();
    REQUIRE(entry.arrival.has_value());
    CHECK(entry.arrival->slot == 1);
  }
}

// A second socket of the peer tells that its process is gone, whatever the channel is made of.
TEST_CASE_TEMPLATE("a sleep ends when a watched socket hangs up, and not when data comes on it",
                   Kind, DFLASH_EVERY_KIND) {
  const ChannelPair pair = Kind::make(kSmall);
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  const OwnedFd own(ends[0]);
  OwnedFd peer(ends[1]);
  for (const bool has_wake_fd : {false, true}) {
    CAPTURE(has_wake_fd);
    const OwnedFd wake(has_wake_fd ? ::eventfd(0, EFD_CLOEXEC) : -1);
    WaitEntry entry;
    entry.channel = pair.host.get();
    entry.hangup_fd = own.get();
    REQUIRE(::send(peer.get(), "beat", 4, 0) == 4);
    int64_t start = now_ns();
    wait_any({&entry, 1}, Deadline::after_ms(30), 0, wake.get());
    CHECK(now_ns() - start >= 30'000'000);
    CHECK(!entry.has_hung_up);

    std::thread closer([&] {
      ::usleep(10'000);
      CHECK(::shutdown(peer.get(), SHUT_RDWR) == 0);
    });
    start = now_ns();
    wait_any({&entry, 1}, Deadline::after_ms(60'000), 0, wake.get());
    closer.join();
    CHECK(entry.has_hung_up);
    CHECK(!entry.arrival.has_value());
    CHECK(now_ns() - start < 30'000'000'000);
    if (!has_wake_fd) {  // a fresh pair for the second round
      int again[2];
      REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, again) == 0);
      REQUIRE(::dup3(again[0], own.get(), O_CLOEXEC) == own.get());
      ::close(again[0]);
      peer = OwnedFd(again[1]);
    }
  }
}

TEST_CASE("a wait on several kinds of channel finds the one that has something") {
  ChannelPair pairs[] = {Loopback::make(kSmall), Shared::make(kSmall), Unix::make(kSmall),
                         Tcp::make(kSmall)};
  for (const bool host_waits : {true, false}) {
    for (size_t sender = 0; sender < 4; ++sender) {
      std::vector<WaitEntry> entries(5);
      for (size_t i = 0; i < 4; ++i)
        entries[i].channel = host_waits ? pairs[i].host.get() : pairs[i].worker.get();
      std::thread publisher([&] {
        Channel& channel = host_waits ? *pairs[sender].worker : *pairs[sender].host;
        CHECK(channel.publish(3, 9).ok());
      });
      wait_any(entries, Deadline::after_ms(10'000), 0);
      publisher.join();
      REQUIRE(entries[sender].arrival.has_value());
      CHECK(entries[sender].arrival->slot == 3);
      for (size_t i = 0; i < entries.size(); ++i)
        CHECK(entries[i].arrival.has_value() == (i == sender));
    }
  }
}

TEST_CASE("a wait with an arrival already stored returns at once and leaves it") {
  const ChannelPair pair = Loopback::make(kSmall);
  REQUIRE(pair.worker->publish(1, 4).ok());
  WaitEntry entries[2];
  entries[0].channel = pair.host.get();
  entries[0].arrival = Arrival{0, {}};
  wait_any(entries, Deadline::after_ms(10'000), 0);
  CHECK(entries[0].arrival->slot == 0);
  CHECK(receive(*pair.host).slot == 1);
}

}  // namespace
}  // namespace dflash::transport
