// A scene in which a shard has two holders. Worker 1 holds shard 1 as in every scene, and worker 0
// holds it too. An honest puppet echoes rows, so both give the same bits.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "client/puppet.h"

namespace dflash::client {

inline constexpr uint32_t kLayer = 3, kShard = 1;

inline SceneOptions quick(bool has_pulses = false) {
  SceneOptions options;
  options.has_pulses = has_pulses;
  options.client.stall_timeout_ns = 60'000'000'000;
  options.client.suspect_ns = 60'000'000'000;
  options.client.hedge_share = 0;
  return options;
}

// Shard 1 is held by worker 1, and by worker 0 after it.
struct Replicated : PuppetScene {
  explicit Replicated(const SceneOptions& options = quick()) : PuppetScene(options) {
    REQUIRE(client.set_holders(kLayer, kShard, {1, 0}).ok());
  }
  void serve(uint32_t worker) { puppets[worker].send(echo(puppets[worker].take())); }
  // Waits for the end, while worker 0 answers whatever it is asked, and returns it.
  Status finish_by_0(const CallPtr& call) {
    const Deadline deadline = Deadline::after_ms(kPatienceMs);
    while (!client.wait(call, Deadline::after_ms(1)) && !deadline.has_passed()) {
      if (auto request = puppets[0].try_take()) puppets[0].send(echo(*request));
    }
    return finish(call);
  }
  Counters counters(uint32_t worker) const {
    for (const CountersOf& one : client.counters()) {
      if (one.worker == worker) return one.counters;
    }
    return {};
  }
  // Waits until worker 0, which shows progress all the while, gets a request.
  Message taken_by_0(const CallPtr& call) {
    const Deadline deadline = Deadline::after_ms(kPatienceMs);
    for (uint64_t counter = 1; !deadline.has_passed(); ++counter) {
      puppets[0].send_pulse(counter);
      static_cast<void>(client.wait(call, Deadline::after_ms(5)));
      if (auto request = puppets[0].try_take()) return *request;
    }
    FAIL("no request came");
    return {};
  }
  // Gives a lost worker a fresh path and new pulses, as after a restart.
  void revive(uint64_t generation = kGeneration + 1, uint32_t worker = 1) {
    auto pair = transport::make_loopback({3, 4096, 4096}).value();
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    REQUIRE(
        client.replace_worker(worker, {std::move(pair.host), generation}, OwnedFd(ends[0])).ok());
    puppets[worker].channel = std::move(pair.worker);
    puppets[worker].pulse = OwnedFd(ends[1]);
  }
};

inline std::vector<EventKind> kinds(const std::vector<ClientEvent>& events) {
  std::vector<EventKind> all;
  for (const ClientEvent& event : events) all.push_back(event.kind);
  return all;
}

}  // namespace dflash::client
