// One task serves; pulses are sent by timers, as from a thread of their own.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/worker_process.h"

#include <utility>

#include "simulation/world.h"

namespace dflash::simulation {

using transport::Side;

namespace {

constexpr int64_t kPulsePeriodNs = wire::kPulsePeriodMs * 1'000'000;
constexpr int64_t kHangUpNs = 100'000'000;      // in which the host acts on a hang-up
constexpr int64_t kIdleNs = 3'600'000'000'000;  // an order wakes it before

}  // namespace

WorkerProcess::WorkerProcess(World& world, uint32_t worker) : world_(world), worker_(worker) {
  experts_.ns_per_pair = world.options.workers[worker].ns_per_pair;
  worker::WorkerOptions options;
  options.name = std::string("w").append(std::to_string(worker));
  expert_worker_ = worker::ExpertWorker::create(options).value();
  for (uint32_t shard = 0; shard < world.options.shards.size(); ++shard) {
    const auto& holders = world.options.holders[shard];
    if (std::find(holders.begin(), holders.end(), worker) == holders.end()) continue;
    check(expert_worker_
              ->hold({0, shard}, make_shard(world.options.shards[shard], shard + 1, experts_))
              .ok(),
          "a simulated worker takes its shards");
  }
  task_ = world.scheduler.spawn([this] { run(); });
}

void WorkerProcess::run() {
  while (!task_->is_killed()) {
    if (next_link_ == nullptr) {
      task_->sleep_until(world_.scheduler.now_ns() + kIdleNs);
    } else {
      serve();
    }
  }
  expert_worker_.reset();
}

void WorkerProcess::serve() {
  link_ = std::exchange(next_link_, nullptr);
  link_->set_listener(Side::kWorker, task_.get());
  is_serving_ = true;
  Status ended = expert_worker_->serve(link_->end(Side::kWorker), link_->generation());
  is_serving_ = false;
  if (task_->is_killed()) return;
  world_.record(JournalEvent::kSessionEnd, worker_, link_->generation(),
                ended.ok() ? 0 : static_cast<uint64_t>(ended.error().code));
  if (next_link_ == nullptr) close_pulse();
}

void WorkerProcess::accept(PathOrder order) {
  if (!is_alive()) return;
  if (task_->is_frozen()) {
    waiting_orders_.push_back(std::move(order));
  } else {
    obey(std::move(order));
  }
}

void WorkerProcess::obey(PathOrder order) {
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

void WorkerProcess::send_pulses(uint64_t session) {
  if (session != num_sessions_ || pulse_ == nullptr || !is_alive()) return;
  const bool passes = world_.workers[worker_].network.passes_at(
                          Side::kWorker, world_.scheduler.now_ns()) == world_.scheduler.now_ns();
  if (!task_->is_frozen() && !is_losing_pulses_ && passes)
    static_cast<void>(pulse_->send(expert_worker_->progress()));
  world_.scheduler.after(kPulsePeriodNs, [this, session] { send_pulses(session); });
}

// The host hears of it when the network lets it.
void WorkerProcess::close_pulse() {
  if (pulse_ == nullptr) return;
  const Network& network = world_.workers[worker_].network;
  const int64_t heard_at = network.passes_at(
      Side::kWorker, world_.scheduler.now_ns() + network.delay_ns + network.added_delay_ns);
  world_.scheduler.at(heard_at, [this, link = link_, pulse = std::exchange(pulse_, nullptr),
                                 is_closed = std::exchange(is_pulse_closed_, nullptr)] {
    pulse->close();
    *is_closed = true;
    world_.host->wake();
    if (link == nullptr) return;
    world_.expected_losses.add({"worker " + std::to_string(worker_) + " has hung up",
                                [link] { return link->is_closed(Side::kHost); },
                                [link] { return link->has_listener(Side::kHost); },
                                [] { return kHangUpNs; }});
  });
}

void WorkerProcess::kill(bool keeps_sent) {
  if (!is_alive()) return;
  if (link_ != nullptr) link_->kill_worker(keeps_sent);
  waiting_orders_.clear();
  close_pulse();
  task_->kill();
}

void WorkerProcess::thaw() {
  task_->thaw();
  for (PathOrder& order : std::exchange(waiting_orders_, {})) obey(std::move(order));
}

}  // namespace dflash::simulation
