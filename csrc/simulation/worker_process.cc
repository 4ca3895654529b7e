// One task serves each session; pulses are sent by timers, as from threads of their own.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/worker_process.h"

#include <algorithm>
#include <string>
#include <utility>

#include "simulation/world.h"

namespace dflash::simulation {

using transport::Side;

namespace {

constexpr int64_t kPulsePeriodNs = wire::kPulsePeriodMs * 1'000'000;
constexpr int64_t kHangUpNs = 100'000'000;      // in which the host acts on a hang-up
constexpr int64_t kIdleNs = 3'600'000'000'000;  // an order wakes it before
// For how long computations for another session may begin while a session waits for its next piece,
// in longest computations of the process so far. The one under way when it asks does not count.
// Then the other one computes until it has had as much more as this one's last turn took, and may
// begin once more where both have had the same. If that one takes this one's piece up and is
// refused, it begins again.
constexpr int64_t kMostOthers = 2;
// Before a batch, turns may wait for who was in the last one, for a small part of its time.
constexpr int64_t kGatheringNs = 1'000'000;
// A piece, and a batch of several, has fewer rows for each expert of its shard while sessions ask
// by turns: 8 pairs for each touched expert are 8 rows of each at most, and pieces of a request
// are made even, by which none doubles.
constexpr size_t kMostRowsPerExpert = 16;
// For each of these that the silence has lasted they may have as many again (worker/pieces.h).
constexpr int64_t kGrowthNs = 1'000'000'000;

}  // namespace

WorkerSession::WorkerSession(World& world, uint32_t host, uint32_t worker, const Shards& shards)
    : world_(world), host_(host), worker_(worker) {
  worker::WorkerOptions options;
  options.name = std::string("w").append(std::to_string(worker));
  expert_worker_ = worker::ExpertWorker::create(options).value();
  for (const auto& [shard, resident] : shards)
    check(expert_worker_->hold({0, shard}, resident).ok(), "a simulated worker takes its shards");
  task_ = world.scheduler.spawn([this] { run(); });
}

Network& WorkerSession::network() const { return world_.hosts[host_].workers[worker_].network; }

void WorkerSession::run() {
  while (!task_->is_killed()) {
    if (next_link_ == nullptr) {
      task_->sleep_until(world_.scheduler.now_ns() + kIdleNs);
    } else {
      serve();
    }
  }
  expert_worker_.reset();
}

void WorkerSession::serve() {
  link_ = std::exchange(next_link_, nullptr);
  link_->set_listener(Side::kWorker, task_.get());
  is_serving_ = true;
  Status ended = expert_worker_->serve(link_->end(Side::kWorker), link_->generation());
  is_serving_ = false;
  if (task_->is_killed()) return;
  world_.record(JournalEvent::kSessionEnd, world_.label(host_, worker_), link_->generation(),
                ended.ok() ? 0 : static_cast<uint64_t>(ended.error().code));
  if (next_link_ == nullptr) close_pulse();
}

void WorkerSession::accept(PathOrder order) {
  if (!is_alive()) return;
  if (task_->is_frozen()) {
    waiting_orders_.push_back(std::move(order));
  } else {
    obey(std::move(order));
  }
}

void WorkerSession::obey(PathOrder order) {
  next_link_ = order.link;
  if (is_serving_) expert_worker_->stop(link_->generation());
  if (order.pulse.is_open()) {
    close_pulse();
    pulse_ = std::make_shared<worker::PulseSender>(std::move(order.pulse));
    is_pulse_closed_ = order.is_pulse_closed;
    send_pulses(++num_sessions_);
  }
  task_->wake();
  order.on_accepted();
}

void WorkerSession::send_pulses(uint64_t session) {
  if (session != num_sessions_ || pulse_ == nullptr || !is_alive()) return;
  const bool passes =
      network().passes_at(Side::kWorker, world_.scheduler.now_ns()) == world_.scheduler.now_ns();
  if (!task_->is_frozen() && !is_losing_pulses_ && passes)
    static_cast<void>(pulse_->send(expert_worker_->progress()));
  world_.scheduler.after(kPulsePeriodNs, [this, session] { send_pulses(session); });
}

// The host hears of it when the network lets it.
void WorkerSession::close_pulse() {
  if (pulse_ == nullptr) return;
  const int64_t heard_at = network().passes_at(
      Side::kWorker, world_.scheduler.now_ns() + network().delay_ns + network().added_delay_ns);
  world_.scheduler.at(heard_at, [this, link = link_, pulse = std::exchange(pulse_, nullptr),
                                 is_closed = std::exchange(is_pulse_closed_, nullptr)] {
    pulse->close();
    *is_closed = true;
    world_.hosts[host_].task->wake();
    if (link == nullptr) return;
    world_.hosts[host_].expected_losses.add(
        {"worker " + std::to_string(world_.label(host_, worker_)) + " has hung up",
         [link] { return link->is_closed(Side::kHost); },
         [link] { return link->has_listener(Side::kHost); }, [] { return kHangUpNs; }});
  });
}

void WorkerSession::kill(bool keeps_sent) {
  if (!is_alive()) return;
  if (link_ != nullptr) link_->kill_worker(keeps_sent);
  waiting_orders_.clear();
  close_pulse();
  task_->kill();
}

void WorkerSession::thaw() {
  task_->thaw();
  others_since_ns_ = 0;  // nobody waited for a turn meanwhile
  for (PathOrder& order : std::exchange(waiting_orders_, {})) obey(std::move(order));
}

std::optional<std::string> WorkerSession::note_computation(uint32_t num_rows, size_t num_experts,
                                                           int64_t longest_ns) {
  const worker::WorkerStats stats = expert_worker_ == nullptr || task_->is_killed()
                                        ? worker::WorkerStats{}
                                        : expert_worker_->stats();
  const bool waits = stats.busy_since_ns != 0 && world_.scheduler.running() != task_.get();
  const bool is_same =
      stats.busy_since_ns == waits_since_ns_ && stats.own.batches == batches_before_;
  waits_since_ns_ = stats.busy_since_ns;
  batches_before_ = stats.own.batches;
  const int64_t now = world_.scheduler.now_ns();
  if (!waits || !is_same || others_since_ns_ == 0) others_since_ns_ = waits ? now : 0;
  if (!waits) return std::nullopt;
  const std::string who = "the session of worker " + std::to_string(world_.label(host_, worker_));
  if (now - others_since_ns_ > kMostOthers * longest_ns + kGatheringNs)
    return who + " has waited for " + std::to_string(now - others_since_ns_) +
           " ns when a computation for another one begins; the longest one so far took " +
           std::to_string(longest_ns) + " ns";
  const auto growth = static_cast<size_t>(1 + (now - stats.busy_since_ns) / kGrowthNs);
  if (num_rows >= kMostRowsPerExpert * num_experts * growth)
    return who + " waits for a computation of " + std::to_string(num_rows) +
           " rows, which should have been cut";
  return std::nullopt;
}

WorkerProcess::WorkerProcess(World& world, uint32_t worker) {
  experts_.ns_per_pair = world.options.workers[worker].ns_per_pair;
  Shards shards;
  for (uint32_t shard = 0; shard < world.options.shards.size(); ++shard) {
    const auto& holders = world.options.holders[shard];
    if (std::find(holders.begin(), holders.end(), worker) != holders.end())
      shards.emplace_back(shard, make_shard(world.options.shards[shard], shard + 1, experts_));
  }
  for (uint32_t host = 0; host < world.hosts.size(); ++host)
    sessions_.push_back(std::make_unique<WorkerSession>(world, host, worker, shards));
  experts_.on_compute = [this, &world](uint32_t num_rows, size_t num_experts) {
    for (const auto& session : sessions_) {
      if (auto broken = session->note_computation(num_rows, num_experts, experts_.longest_ns))
        world.violate(std::move(*broken));
    }
  };
}

void WorkerProcess::kill(bool keeps_sent) {
  for (const auto& session : sessions_) session->kill(keeps_sent);
}

void WorkerProcess::freeze() {
  for (const auto& session : sessions_) session->freeze();
}

void WorkerProcess::thaw() {
  for (const auto& session : sessions_) session->thaw();
}

void WorkerProcess::set_losing_pulses(bool is_losing) {
  for (const auto& session : sessions_) session->set_losing_pulses(is_losing);
}

bool WorkerProcess::is_over() const {
  return std::ranges::all_of(sessions_, [](const auto& session) { return session->is_over(); });
}

}  // namespace dflash::simulation
