// When a call or a worker is given up: failures, hang-ups, frozen progress, deadlines.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "client/engine.h"

namespace dflash::client {

void Engine::fail(Call& call, Error error) {
  if (call.is_done) return;
  call.error = std::move(error);
  for (const auto& worker : workers_) {
    worker->drop_waiting(call);
    for (uint32_t slot = 0; slot < worker->slots.size(); ++slot) {
      const Part* part = worker->slots[slot].part;
      if (part != nullptr && part->call == &call) worker->quarantine(slot);
    }
  }
  end(call);
}

void Engine::lose(WorkerEnd& worker, ErrorCode code, const std::string& reason) {
  if (worker.is_lost) return;
  std::vector<CallPtr> ended;
  for (const CallPtr& call : calls_) {
    const bool needs_it =
        std::any_of(call->work->parts.begin(), call->work->parts.end(), [&](const Part& part) {
          return workers_[part.worker].get() == &worker && part.state != PartState::kArrived;
        });
    if (needs_it) ended.push_back(call);
  }
  for (const CallPtr& call : ended) {
    fail(*call, Error{code, "worker " + worker.link.name + " was lost: " + reason + " (layer " +
                                call->layer->plan.name + ")"});
  }
  worker.close(reason);
}

void Engine::lose_after_drain(WorkerEnd& worker, const std::string& reason) {
  if (!worker.is_leased) drain(worker);
  lose(worker, ErrorCode::kWorkerLost, reason);
}

void Engine::judge_all(int64_t now) {
  last_judged_ns_ = now;
  for (const auto& worker : workers_) {
    if (worker->is_lost || worker->is_leased) continue;  // judge_step() is about those
    if (const auto failure = worker->read_pulses(now)) {
      lose_after_drain(*worker, *failure);
    } else if (worker->is_stalled(now, options_.stall_timeout_ns)) {
      const uint32_t num_owed = worker->num_in_flight();
      drain(*worker);
      if (worker->num_in_flight() == num_owed)
        lose(*worker, ErrorCode::kWorkerLost, worker->stall_text(now));
    }
  }
}

void Engine::end_late_calls(int64_t now) {
  std::vector<CallPtr> late;
  for (const CallPtr& call : calls_) {
    if (now >= call->deadline_ns) late.push_back(call);
  }
  for (const CallPtr& call : late) {
    const auto& parts = call->work->parts;
    const auto owed = std::find_if(parts.begin(), parts.end(), [](const Part& part) {
      return part.state != PartState::kArrived;
    });
    fail(*call, Error{ErrorCode::kTimeout,
                      "worker " + workers_[owed->worker]->link.name + " did not answer layer " +
                          call->layer->plan.name + " within " +
                          seconds_text(call->deadline_ns - call->submitted_ns) +
                          "; raise ipc.call_timeout_s if it is only slow"});
  }
}

}  // namespace dflash::client
