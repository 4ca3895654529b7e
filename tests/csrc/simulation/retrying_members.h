// A membership that tries every lost worker again after 100 ms, for tests without an interpreter.
// The product's own, with back-off and quarantine, drives `dflash-moe simulate`.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "simulation/membership.h"
#include "simulation/options.h"

namespace dflash::simulation {

class RetryingMembers final : public Membership {
 public:
  explicit RetryingMembers(size_t num_workers) : members_(num_workers) {}

  MemberDecision on(const MemberEvent& event, int64_t now_ns) override {
    Member& member = members_[event.worker];
    std::vector<MemberOrder> orders;
    const auto is_in = [&member](const char* state) { return member.state == state; };
    const bool is_old = event.attempt != 0 && event.attempt != member.attempt;
    const auto go = [&](const char* state, const char* task, int64_t until_ns = 0) {
      member.state = state;
      orders.push_back({task, member.attempt, until_ns});
    };
    const auto begin = [&] {
      ++member.attempt;
      go("starting", "start");
    };
    if (is_old) return {{}, member.state, member.state != "gone", member.attempt};
    switch (event.what) {
      case Happening::kAdded:
        if (is_in("gone")) begin();
        break;
      case Happening::kStarted:
        if (is_in("starting")) go("joining", "join");
        break;
      case Happening::kJoined:
        if (is_in("joining")) member.state = "ready";
        break;
      case Happening::kFailed:
      case Happening::kUnfit:
        if (is_in("starting") || is_in("joining")) go("lost", "end");
        break;
      case Happening::kLost:
        if (is_in("ready") || is_in("joining")) go("lost", "end");
        if (is_in("draining")) go("ending", "end");
        break;
      case Happening::kEnded:
        if (is_in("ending")) {
          member.state = "gone";
        } else if (is_in("lost")) {
          go("waiting", "wait", now_ns + 100'000'000);
        }
        break;
      case Happening::kDue:
        if (is_in("waiting")) begin();
        break;
      case Happening::kRemoved:
        if (is_in("ready")) go("draining", "drain");
        break;
      case Happening::kDrained:
        if (is_in("draining")) go("ending", "end");
        break;
      case Happening::kReleased: break;
    }
    return {orders, member.state, member.state != "gone", member.attempt};
  }

 private:
  struct Member {
    std::string state = "gone";
    uint64_t attempt = 0;
  };
  std::vector<Member> members_;
};

inline std::unique_ptr<Membership> make_retrying(uint64_t, const Options& options) {
  return std::make_unique<RetryingMembers>(options.workers.size());
}

}  // namespace dflash::simulation
