// Device steps: the data paths of all workers in the hands of the host's device, which publishes
// requests and takes replies by itself.
// SPDX-License-Identifier: Apache-2.0
#include "client/engine.h"
#include "wire/payload.h"

namespace dflash::client {

Result<std::vector<StepLane>> Engine::begin_step(uint32_t num_calls, uint64_t* first_call) {
  std::vector<StepLane> lanes;
  for (uint32_t index = 0; index < num_workers(); ++index) {
    const WorkerEnd& worker = *workers_[index];
    const std::string& name = worker.link.name;
    if (worker.is_lost)
      return Error{ErrorCode::kWorkerLost, "worker " + name + " was lost: " + worker.reason};
    if (worker.is_leased || worker.is_retired)
      return Error{ErrorCode::kInvalidArgument,
                   "worker " + name + " is in a device step, or had a failed one"};
    if (worker.is_listening() || !worker.waiting.empty()) {
      return Error{
          ErrorCode::kInvalidArgument,
          "worker " + name + " still owes replies; a device step begins when all calls are done"};
    }
    auto ring = worker.link.channel->ring();
    if (!ring) {
      return Error{ErrorCode::kUnsupported,
                   "worker " + name + " is reached by " + worker.link.channel->kind() +
                       "; device steps need shared memory: call experts() outside of a step"};
    }
    lanes.push_back({index, name, worker.link.generation, worker.link.channel->geometry(),
                     worker.link.request_dtype, worker.link.reply_dtype, std::move(*ring)});
  }
  const int64_t now = now_ns();
  for (const auto& worker : workers_) worker->lease(now);
  *first_call = next_call_id_;
  next_call_id_ += num_calls;
  return lanes;
}

Status Engine::judge_step(int64_t now) {
  for (const auto& worker : workers_) {
    if (!worker->is_leased) continue;
    if (!worker->is_lost) {
      if (const auto failure = worker->read_pulses(now)) {
        lose(*worker, ErrorCode::kWorkerLost, *failure);
      } else if (worker->is_stalled(now, options_.stall_timeout_ns)) {
        lose(*worker, ErrorCode::kWorkerLost, worker->stall_text(now));
      }
    }
    if (worker->is_lost)
      return Error{ErrorCode::kWorkerLost,
                   "worker " + worker->link.name + " was lost: " + worker->reason};
  }
  return ok();
}

void Engine::end_step(std::span<const std::pair<uint32_t, uint32_t>> heads_and_tails,
                      std::span<const StepMessage> answered, bool has_failed) {
  size_t lane = 0;
  for (const auto& worker : workers_) {
    if (!worker->is_leased) continue;
    worker->is_leased = false;
    const bool is_told = lane < heads_and_tails.size();
    if (!worker->is_lost && is_told)
      worker->link.channel->set_ring(heads_and_tails[lane].first, heads_and_tails[lane].second);
    worker->is_retired = !worker->is_lost && (has_failed || !is_told);
    ++lane;
  }
  for (const StepMessage& message : answered) {
    if (message.worker >= num_workers()) continue;
    const Layer* found = layer(message.layer);
    WorkerEnd& worker = *workers_[message.worker];
    Counters& counters = worker.counters[message.layer];
    ++counters.calls;
    counters.rows += message.num_rows;
    counters.pairs += message.num_pairs;
    counters.request_bytes += message.request_bytes;
    counters.reply_bytes += message.reply_bytes;
    if (found == nullptr) continue;
    counters.floor_bytes +=
        wire::floor_bytes(message.num_rows, message.num_pairs, found->plan.in_size,
                          worker.link.request_dtype, found->plan.out_size, worker.link.reply_dtype);
  }
}

}  // namespace dflash::client
