// Many threads, one client: nobody waits for a stranger's call, nobody drives twice, and the turn
// is handed on.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <time.h>

#include <atomic>
#include <new>
#include <thread>
#include <utility>

#include "client/puppet.h"
#include "client/turn.h"
#include "transport/faulty/faulty.h"

namespace dflash::client {
namespace {

// Answers honestly until told to stop.
class EchoThread {
 public:
  explicit EchoThread(Puppet& puppet) : thread_([this, &puppet] { run(puppet); }) {}
  ~EchoThread() {
    stopping_ = true;
    thread_.join();
  }

 private:
  void run(Puppet& puppet) {
    while (!stopping_) {
      transport::WaitEntry entry{puppet.channel.get(), std::nullopt, std::nullopt};
      transport::wait_any({&entry, 1}, Deadline::after_ms(5), 0);
      if (!entry.arrival) continue;
      puppet.send(echo(Message(*entry.arrival)));
    }
  }

  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

TEST_CASE("a call ends for a caller who waits no time at all, again and again") {
  PuppetScene scene;
  Tokens tokens{{0}};
  const CallPtr call = scene.submit(tokens);
  scene.serve(0);
  const Deadline patience = Deadline::after_ms(30'000);
  while (!scene.client.wait(call, Deadline::at_ns(0)) && !patience.has_passed()) {
  }
  CHECK(scene.client.outcome(call).ok());
  CHECK(tokens.is_right());
}

TEST_CASE("the turn comes back from a caller whose memory has run out while it waited") {
  PuppetScene scene;
  auto pair = transport::make_loopback({3, 4096, 4096}).value();
  bool has_memory = false;
  auto host = transport::make_rewritten(std::move(pair.host), [&](std::span<std::byte>) {
    if (!std::exchange(has_memory, true)) throw std::bad_alloc();
  });
  REQUIRE(scene.client.renew_path(0, {std::move(host), kGeneration + 1}).ok());
  scene.puppets[0].channel = std::move(pair.worker);
  Tokens tokens{{0}};
  const CallPtr call = scene.submit(tokens);
  scene.serve(0);
  CHECK_THROWS_AS(scene.client.wait(call, Deadline::after_ms(kPatienceMs)), std::bad_alloc);
  scene.client.abandon(call);  // it would wait for the turn without end
  CHECK(scene.works(0));
}

// Waits for a call that nobody answers, and returns the time on a core that it takes.
int64_t busy_ns_of_wait(PuppetScene& scene, const CallPtr& call) {
  const auto busy_ns = [] {
    timespec used{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return int64_t{used.tv_sec} * 1'000'000'000 + used.tv_nsec;
  };
  const int64_t before = busy_ns();
  CHECK_FALSE(scene.client.wait(call, Deadline::after_ms(200)));
  return busy_ns() - before;
}

TEST_CASE("a wait leaves its core alone while spinning is not allowed") {
  SceneOptions options;
  options.client.spin_ns = 50'000'000'000;
  PuppetScene scene(options);
  Tokens tokens{{0}};
  const CallPtr call = scene.submit(tokens);
  // A sleeping wait wakes once in 20 ms for some microseconds. Others may have the core of one that
  // spins, and a virtual machine may be charged for what its host does meanwhile.
  constexpr int64_t kSleepsNs = 10'000'000;
  for (const bool spins : {false, true}) {
    CAPTURE(spins);
    scene.client.set_spinning(spins);
    const Deadline patience = Deadline::after_ms(kPatienceMs);
    bool has_spun = !spins;
    while (has_spun != spins && !patience.has_passed())
      has_spun = busy_ns_of_wait(scene, call) > kSleepsNs;
    CHECK(has_spun == spins);
  }
  scene.serve(0);
  CHECK(scene.finish(call).ok());
}

TEST_CASE("threads that submit and wait at once all get their own result") {
  SceneOptions options;
  options.geometry = {4, 4096, 4096};
  options.policy = {2, 3};
  PuppetScene scene(options);
  EchoThread first(scene.puppets[0]), second(scene.puppets[1]);
  std::atomic<int> num_right{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < 100; ++i) {
        Tokens tokens{
            {0,          2},
            {thread % 4, 3},
            {1,          1},
            {3,          2},
            {0,          3}
        };
        auto call = scene.client.submit(tokens.batch(), 3);
        if (!call.ok()) continue;
        while (!scene.client.wait(call.value(), Deadline::after_ms(20))) {
        }
        if (scene.client.outcome(call.value()).ok() && tokens.is_right()) ++num_right;
      }
    });
  }
  // short turns, as a control thread takes them
  for (int i = 0; i < 100; ++i) static_cast<void>(scene.client.counters());
  for (std::thread& thread : threads) thread.join();
  CHECK(num_right == 400);
}

TEST_CASE(
    "a call that another thread's driving ended is seen at once by the thread that waits for it") {
  PuppetScene scene;
  Tokens silent{{0}}, answered{{2}};
  const CallPtr never = scene.submit(silent);
  std::atomic<bool> stopping{false};
  std::thread driver([&] {
    while (!stopping) scene.client.wait(never, Deadline::after_ms(20));
  });
  const CallPtr call = scene.submit(answered);
  scene.serve(1);
  CHECK(scene.client.wait(call, Deadline::after_ms(kPatienceMs)));
  CHECK(answered.is_right());
  stopping = true;
  driver.join();
  scene.client.abandon(never);
}

TEST_CASE("a short turn interrupts a driver that sleeps, again and again") {
  PuppetScene scene;
  Tokens silent{{0}};
  const CallPtr never = scene.submit(silent);
  std::atomic<bool> stopping{false};
  std::thread driver([&] {
    while (!stopping) scene.client.wait(never, Deadline::after_ms(1000));
  });
  // A turn that waits for the driver's tick takes 20 ms. One that interrupts it takes microseconds,
  // unless its thread waits for a core: on a busy machine it takes more turns until enough had one.
  constexpr int kEnough = 100;
  const Deadline patience = Deadline::after_ms(kPatienceMs);
  int num_interrupting = 0, num_turns = 0;
  for (; num_interrupting < kEnough && !patience.has_passed(); ++num_turns) {
    const int64_t before_ns = now_ns();
    static_cast<void>(scene.client.workers());
    if (now_ns() - before_ns < 10'000'000) ++num_interrupting;
  }
  CAPTURE(num_turns);
  CHECK(num_interrupting == kEnough);
  scene.client.abandon(never);
  stopping = true;
  driver.join();
}

TEST_CASE("a turn excludes every other, whoever wants it") {
  TurnTable turns;
  int inside = 0;  // guarded by the turn; the sanitizers check that too
  int64_t total = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < 500; ++i) {
        if (thread < 2) {
          const Turn turn(turns);
          CHECK(++inside == 1);
          ++total;
          --inside;
        } else {
          while (!turns.acquire_to_drive(Deadline::after_ms(1000))) {
          }
          CHECK(++inside == 1);
          ++total;
          --inside;
          turns.release();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(total == 2000);
}

}  // namespace
}  // namespace dflash::client
