// What every call of a simulation is judged by: it ends once, by its deadline, with the right bits
// or with a typed error that an injected fault explains, and after its end nobody touches its
// output.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/caller.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "client/calls.h"

namespace dflash::simulation {
namespace {

constexpr float kPoison = -7.25e18f;  // no sum of toy experts comes near
// For how long the output of an ended call is watched: longer than any process stays frozen.
constexpr int64_t kWatchNs = 12'000'000'000;

constexpr uint32_t kNobody = ~uint32_t{0};
constexpr uint64_t kCallsOfHost = 1'000'000'000;  // numbers, more than a host makes

std::string name_of(const char* what, uint64_t number) {
  return what + std::to_string(number) + ": ";
}

}  // namespace

Rows Caller::draw_rows() {
  const Options& options = world_.options;
  Rows rows;
  rows.top_k = options.top_k;
  rows.num_tokens = static_cast<uint32_t>(random_.magnitude(1, this->options().max_tokens));
  const size_t num_pairs = size_t{rows.num_tokens} * rows.top_k;
  for (size_t i = 0; i < num_pairs; ++i) {
    rows.topk_ids.push_back(static_cast<int32_t>(random_.below(options.num_experts)));
    rows.topk_weights.push_back(static_cast<float>(random_.unit()));
  }
  for (size_t i = 0; i < size_t{rows.num_tokens} * kRowWidth; ++i)
    rows.hidden_states.push_back(static_cast<float>(2 * random_.unit() - 1));
  return rows;
}

TokenBatch Caller::batch_of(Made& made) const {
  TokenBatch batch;
  batch.hidden_states = reinterpret_cast<const std::byte*>(made.rows.hidden_states.data());
  batch.row_stride_bytes = kRowWidth * sizeof(float);
  batch.num_tokens = made.rows.num_tokens;
  batch.top_k = made.rows.top_k;
  batch.topk_ids = made.rows.topk_ids.data();
  batch.topk_weights = reinterpret_cast<const std::byte*>(made.rows.topk_weights.data());
  batch.output = reinterpret_cast<std::byte*>(made.output.data());
  return batch;
}

void Caller::submit() {
  auto made = std::make_unique<Made>();
  made->number = kCallsOfHost * host_ + counts_.calls++;
  made->rows = draw_rows();
  made->output.assign(made->rows.hidden_states.size(), kPoison);
  made->submitted_ns = world_.scheduler.now_ns();
  world_.record(JournalEvent::kSubmit, made->number, made->rows.num_tokens);
  auto call = client_->submit(batch_of(*made), 0);
  if (!call.ok()) {
    made->ended_ns = made->submitted_ns;
    judge_error(*made, call.error());
    return bury(std::move(made));
  }
  made->call = std::move(call).value();
  made->away_before_ns = record_.away_ns;
  record_.longest_limit_ns =
      std::max(record_.longest_limit_ns, made->call->deadline_ns - made->call->asked_ns);
  under_way_.push_back(std::move(made));
}

void Caller::wait(Deadline tick) {
  if (!under_way_.empty()) {
    client_->wait(under_way_.front()->call, tick);
    world_.look(host_);
  }
  for (auto& made : under_way_) {
    if (!made->call->is_done.load(std::memory_order_acquire)) continue;
    end(*made);
    bury(std::move(made));
  }
  std::erase(under_way_, nullptr);
}

void Caller::end(Made& made) {
  const client::Call& call = *made.call;
  made.ended_ns = call.ended_ns;
  const int64_t late_ns = call.done_ns - call.deadline_ns;
  if (late_ns > client::kTickNs)
    world_.violate(name_of("call ", made.number) + "it ended " + std::to_string(late_ns / 1000) +
                   " us after its deadline");
  // What does not count is the time in which the host was away, but for a tick of each absence.
  const int64_t missed_ns = made.ended_ns - made.submitted_ns - (call.done_ns - call.asked_ns);
  if (missed_ns > record_.away_ns - made.away_before_ns)
    world_.violate(name_of("call ", made.number) + std::to_string(missed_ns / 1000) +
                   " us did not count, and the host was not away for so long");
  if (call.deadline_ns - call.asked_ns > client::kMaxPatience * world_.options.call_timeout_ns)
    world_.violate(name_of("call ", made.number) + "its deadline is out of bounds");
  const Status outcome = client_->outcome(made.call);
  if (outcome.ok()) {
    judge_output(made);
  } else {
    judge_error(made, outcome.error());
  }
}

void Caller::judge_output(const Made& made) {
  ++counts_.succeeded;
  world_.record(JournalEvent::kSucceed, made.number,
                static_cast<uint64_t>(made.ended_ns - made.submitted_ns) / 1000);
  const auto expected = expected_output(made.rows, world_.options.shards);
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::memcmp(&expected[i], &made.output[i], sizeof(float)) == 0) continue;
    world_.violate(name_of("call ", made.number) + "token " + std::to_string(i / kRowWidth) +
                   ", column " + std::to_string(i % kRowWidth) + " is " +
                   std::to_string(made.output[i]) + ", right is " + std::to_string(expected[i]));
    return;
  }
}

void Caller::judge_error(const Made& made, const Error& error) {
  ++counts_.failed[static_cast<size_t>(error.code)];
  world_.record(JournalEvent::kFail, made.number, static_cast<uint64_t>(error.code));
  const std::string call = name_of("call ", made.number) + error.message;
  switch (error.code) {
    case ErrorCode::kRange:
      if (counts_.failed[static_cast<size_t>(ErrorCode::kRange)] >
          world_.num_faults[static_cast<size_t>(SimulatedFault::kRefuseRange)])
        world_.violate(call + " - but no worker said so");
      return;
    case ErrorCode::kProtocol:
    case ErrorCode::kWorkerLost:
    case ErrorCode::kTimeout:
    case ErrorCode::kWorkerFailed:
      if (needed_only_healthy(made, missing_copy(made, error)))
        world_.violate(call + " - but each of its shards had a healthy holder throughout");
      return;
    default: world_.violate(call + " - an error that nothing here explains");
  }
}

// Nobody makes the host's own copy for a worker that merely refuses, or is merely slow: one that
// has answered something since the call began.
uint32_t Caller::missing_copy(const Made& made, const Error& error) const {
  const bool is_slow =
      error.code == ErrorCode::kTimeout &&
      std::ranges::any_of(record_.workers, [&made](const WorkerOfHost& worker) {
        return worker.healthy_since_ns > made.submitted_ns && worker.replied_ns > made.submitted_ns;
      });
  const bool is_missed = error.code != ErrorCode::kWorkerFailed && !is_slow;
  return world_.options.joins_late && !is_missed ? world_.num_remote() : kNobody;
}

bool Caller::needed_only_healthy(const Made& made, uint32_t except) const {
  const Options& options = world_.options;
  const auto is_healthy = [&](uint32_t worker) {
    return worker != except && record_.workers[worker].healthy_since_ns <= made.submitted_ns;
  };
  for (size_t shard = 0; shard < options.shards.size(); ++shard) {
    const auto& experts = options.shards[shard];
    const bool is_needed =
        std::any_of(made.rows.topk_ids.begin(), made.rows.topk_ids.end(), [&](int32_t id) {
          return std::binary_search(experts.begin(), experts.end(), static_cast<uint32_t>(id));
        });
    if (is_needed &&
        std::none_of(options.holders[shard].begin(), options.holders[shard].end(), is_healthy))
      return false;
  }
  return true;
}

void Caller::abandon_one() {
  if (under_way_.empty()) return;
  auto made = std::move(under_way_[random_.below(under_way_.size())]);
  std::erase(under_way_, nullptr);
  world_.record(JournalEvent::kAbandon, made->number);
  client_->abandon(made->call);
  made->ended_ns = world_.scheduler.now_ns();
  ++counts_.abandoned;
  bury(std::move(made));
}

void Caller::bury(std::unique_ptr<Made> made) {
  if (made == nullptr) return;
  std::fill(made->output.begin(), made->output.end(), kPoison);
  made->call.reset();
  ended_.push_back(std::move(made));
  check_ended_outputs(false);
}

void Caller::check_ended_outputs(bool all) {
  const int64_t now = world_.scheduler.now_ns();
  while (!ended_.empty() && (all || now - ended_.front()->ended_ns > kWatchNs)) {
    const Made& made = *ended_.front();
    const bool is_untouched = std::all_of(made.output.begin(), made.output.end(),
                                          [](float value) { return value == kPoison; });
    if (!is_untouched)
      world_.violate(name_of("call ", made.number) + "its output was written after its end");
    ended_.pop_front();
  }
}

}  // namespace dflash::simulation
