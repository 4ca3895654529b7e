// Makes calls through the real client and judges how each of them ends.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "client/call.h"
#include "client/expert_client.h"
#include "simulation/experts.h"
#include "simulation/world.h"

namespace dflash::simulation {

inline constexpr size_t kNumErrorCodes = static_cast<size_t>(ErrorCode::kClosed) + 1;

struct CallCounts {
  uint64_t calls = 0, succeeded = 0, abandoned = 0;
  std::array<uint64_t, kNumErrorCodes>
      failed{};  // by error code; abandoned ones are not among them

  void add(const CallCounts& other) {
    calls += other.calls;
    succeeded += other.succeeded;
    abandoned += other.abandoned;
    for (size_t code = 0; code < kNumErrorCodes; ++code) failed[code] += other.failed[code];
  }
};

// It runs on the host's task.
class Caller {
 public:
  Caller(World& world, uint32_t host, client::ExpertClient& client)
      : world_(world),
        record_(world.hosts[host]),
        host_(host),
        client_(&client),
        random_(world.random.split()) {}
  // The host has a new client; no call is under way.
  void change_client(client::ExpertClient& client) { client_ = &client; }

  void submit();
  // Waits for the oldest call under way, at most until `tick`, and judges all that have ended.
  void wait(Deadline tick);
  void abandon_one();
  // Checks that nothing was written to the outputs of calls that had ended; those that ended long
  // ago are forgotten then.
  void check_ended_outputs(bool all);

  size_t num_under_way() const { return under_way_.size(); }
  const CallCounts& counts() const { return counts_; }

 private:
  struct Made {
    client::CallPtr call;
    uint64_t number = 0;
    Rows rows;
    std::vector<float> output;
    int64_t submitted_ns = 0, ended_ns = 0;
    int64_t away_before_ns = 0;
  };

  // How the host's calls are made.
  const SimulatedHostOptions& options() const { return world_.options.hosts[host_]; }
  Rows draw_rows();
  TokenBatch batch_of(Made& made) const;
  void end(Made& made);
  void judge_output(const Made& made);
  void judge_error(const Made& made, const Error& error);
  // Whether each shard that the call needs had a holder that was healthy throughout, other than
  // `except`.
  bool needed_only_healthy(const Made& made, uint32_t except) const;
  uint32_t missing_copy(const Made& made, const Error& error) const;
  void bury(std::unique_ptr<Made> made);

  World& world_;
  HostRecord& record_;
  const uint32_t host_;
  client::ExpertClient* client_;
  Random random_;
  CallCounts counts_;
  std::vector<std::unique_ptr<Made>> under_way_;
  std::deque<std::unique_ptr<Made>> ended_;  // whose outputs are watched, oldest first
};

}  // namespace dflash::simulation
