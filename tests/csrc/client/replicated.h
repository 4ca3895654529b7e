// A scene in which a shard has two holders. Worker 1 holds shard 1 as in every scene, and worker 0
// holds it too. An honest puppet echoes rows, so both give the same bits.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "client/puppet.h"

namespace dflash::client {

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
};

inline std::vector<EventKind> kinds(const std::vector<ClientEvent>& events) {
  std::vector<EventKind> all;
  for (const ClientEvent& event : events) all.push_back(event.kind);
  return all;
}

}  // namespace dflash::client
