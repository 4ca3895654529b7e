// What is done to a whole client: a drive of its wheels, changes of its workers and paths, device
// steps. Each ends by giving work to whoever can have it now.
// SPDX-License-Identifier: Apache-2.0
#include "client/engine.h"

#include <limits>
#include <utility>

namespace dflash::client {

Engine::Engine(const ClientOptions& options)
    : crew_{options, {}, {}},
      calls_(crew_, reply_buffers_),
      sending_(crew_, calls_, late_watch_),
      remedies_(crew_, calls_, sending_, late_watch_),
      answers_(crew_, reply_buffers_, calls_, remedies_),
      losses_(crew_, calls_, remedies_, answers_),
      spin_ns_(options.spin_ns) {
  // Whoever waits no longer for a worker is answered by the last resort, and not by an error.
  crew_.options.reconnect_grace_ns = std::min(options.reconnect_grace_ns, options.park_ns);
}

// Work that has lost its worker comes first, then calls that have waited, then what has a credit.
void Engine::settle(int64_t now) {
  remedies_.rehome_all(now);
  calls_.admit_parked();
  while (const auto broken = sending_.pump()) losses_.lose(*broken->link, broken->error);
}

// -- workers and layers --

uint32_t Engine::add_worker(NewWorker worker) {
  const auto index = static_cast<uint32_t>(crew_.links.size());
  crew_.links.push_back(std::make_unique<Link>(std::move(worker), index, events_));
  wait_entries_.resize(crew_.links.size());
  return index;
}

Status Engine::set_holders(uint32_t layer, uint32_t shard, const std::vector<uint32_t>& workers) {
  DFLASH_TRY(layers_.set_holders(layer, shard, workers, crew_.links));
  if (workers.size() > 1) late_watch_.begin();
  for (const auto& link : crew_.links) remedies_.move_waiting(*link, crew_.now());
  settle();
  return ok();
}

void Engine::set_admission(Link& link, Admission admission) {
  link.admission = admission;
  remedies_.move_waiting(link, crew_.now());
  settle();
  link.tell_if_idle();
}

void Engine::set_remedy(Link& link, bool has_remedy) {
  link.has_remedy = has_remedy;
  settle();  // where there is none any more, nobody waits for it
}

// -- calls and progress --

Status Engine::start(const CallPtr& call) {
  const int64_t real_now = now_ns();
  losses_.judge_if_due(real_now);
  Status started = calls_.start(call, real_now);
  settle(crew_.clock.at(real_now));
  return started;
}

void Engine::resume() {
  calls_.resume();
  settle();
}

void Engine::drive(Deadline tick, int wake_fd) {
  const int64_t began = now_ns();
  crew_.clock.look(began);
  const int64_t left_ns = std::clamp(next_look_ns() - crew_.clock.at(began), int64_t{0}, kTickNs);
  for (size_t i = 0; i < crew_.links.size(); ++i) {
    const Link& link = *crew_.links[i];
    transport::WaitEntry& entry = wait_entries_[i];
    entry.channel = link.path.is_listening() ? link.path.channel() : nullptr;
    entry.arrival.reset();
    entry.error.reset();
    entry.hangup_fd = link.liveness.fd();
    entry.has_hung_up = false;
  }
  wait_for_reply(tick.earlier(Deadline::at_ns(began + left_ns)), began, wake_fd);
  const int64_t real_now = now_ns();
  crew_.clock.look(real_now);
  const int64_t now = crew_.clock.at(real_now);
  charge_wait(real_now - began);
  for (size_t i = 0; i < crew_.links.size(); ++i) {
    Link& link = *crew_.links[i];
    const transport::WaitEntry& entry = wait_entries_[i];
    if (entry.channel == nullptr || link.path.is_lost()) continue;
    if (entry.error) {
      losses_.lose(link, *entry.error);
    } else if (entry.arrival) {
      Status taken = answers_.take(link, *entry.arrival);
      if (taken.ok()) taken = answers_.drain(link);
      if (!taken.ok()) losses_.lose(link, taken.error());
    }
    if (entry.has_hung_up) losses_.judge(link, now);
  }
  losses_.judge_if_due(real_now);
  remedies_.rehome_all(now);
  calls_.admit_parked();
  if (late_watch_.is_due(now)) {
    while (const auto broken = remedies_.hedge_all(now)) losses_.lose(*broken->link, broken->error);
  }
  losses_.end_late_calls(now);
  settle(now);
}

// The first time at which something is late.
int64_t Engine::next_look_ns() const {
  int64_t next = late_watch_.next_ns();
  for (const CallPtr& call : calls_.all()) next = std::min(next, call->deadline_ns);
  return next;
}

// Spinning through a computation of milliseconds would take a core from whoever else wants it;
// sleeping through all of it would add a wake-up to every call. So a wait sleeps while no reply can
// come, by the worker's model, and spins around the time at which one should. Where the model is
// wrong, the wait costs what it would have cost without: one wake-up, after at most this much
// spinning.
void Engine::wait_for_reply(Deadline until, int64_t now, int wake_fd) {
  const int64_t reply = spin_ns_ > 0 ? next_reply_ns() : 0;
  if (reply <= now) {
    transport::wait_any(wait_entries_, until, spin_ns_, wake_fd);
    return;
  }
  const int64_t quiet_until = reply - kWakeLeadNs;
  const int64_t spin_ns = reply - std::max(now, quiet_until) + spin_ns_;
  transport::wait_any(wait_entries_, until, spin_ns, wake_fd, quiet_until);
}

// When the first reply is predicted; 0 where a worker has several requests, which it takes in turns
// of unknown length, or where nothing is under way.
int64_t Engine::next_reply_ns() const {
  int64_t first = std::numeric_limits<int64_t>::max();
  for (const auto& link : crew_.links) {
    const Path& path = link->path;
    if (path.is_lost() || path.num_in_flight() == 0) continue;
    if (path.num_in_flight() > 1) return 0;
    for (const Slot& slot : path.slots()) {
      if (slot.attempt.slice == nullptr) continue;
      first = std::min(
          first, slot.attempt.published_ns + slot.attempt.slice->forecast_ns + link->behind_ns());
      break;
    }
  }
  return first == std::numeric_limits<int64_t>::max() ? 0 : first;
}

void Engine::charge_wait(int64_t elapsed_ns) {
  for (const auto& link : crew_.links) {
    if (link->path.owes()) link->counters[link->last_layer].wait_ns += elapsed_ns;
  }
}

// -- data paths --

void Engine::lose_after_drain(Link& link, const std::string& reason) {
  losses_.lose_after_drain(link, reason);
  settle();
}

int64_t Engine::pulse_age_ns(Link& link) {
  losses_.judge(link, crew_.now());
  settle();
  return now_ns() - link.liveness.last_pulse_ns();
}

Status Engine::check_idle(const Link& link) const {
  if (link.path.is_lost())
    return link.error(ErrorCode::kWorkerLost, "is lost: " + link.path.reason());
  if (link.owes()) return link.path_error("is in use; wait until nothing is under way");
  return ok();
}

Status Engine::retire_path(Link& link, const std::string& reason) {
  DFLASH_TRY(check_idle(link));
  if (link.path.is_retired()) return link.path_error("is being renewed already");
  link.path.retire(reason);
  return ok();
}

Status Engine::renew_path(Link& link, NewPath path) {
  DFLASH_TRY(check_idle(link));
  link.renew(std::move(path), crew_.now(), crew_.options.call_timeout_ns);
  settle();
  return ok();
}

Status Engine::replace_worker(Link& link, NewPath path, OwnedFd pulse) {
  const char* unfit = nullptr;
  if (!link.path.is_lost())
    unfit = "it is not lost; renew its data path, or mark it lost first";
  else if (path.generation == link.path.generation())
    unfit = "its fresh path has the generation of the lost one";
  if (unfit != nullptr)
    return link.error(ErrorCode::kInvalidArgument, std::string("cannot be replaced: ") + unfit);
  link.replace(std::move(path), std::move(pulse));
  settle();
  return ok();
}

void Engine::wear_out_unfit() {
  for (const auto& link : crew_.links) {
    // The late reply of a worker that is suspected frees a slot, or the worker is given up.
    if (link->path.num_quarantined() > 0 && !link->is_suspect())
      link->path.wear_out("a device step needs all of its slots");
  }
}

std::vector<WornPath> Engine::retire_worn_paths() {
  std::vector<WornPath> retired;
  for (uint32_t index = 0; index < crew_.links.size(); ++index) {
    Path& path = crew_.links[index]->path;
    if (!path.is_ready_to_retire()) continue;
    retired.push_back({index, path.reason()});
    path.retire(path.reason());
  }
  return retired;
}

bool Engine::has_path_to_retire() const {
  return std::any_of(crew_.links.begin(), crew_.links.end(),
                     [](const auto& link) { return link->path.is_ready_to_retire(); });
}

bool Engine::must_step_wait() {
  // Where all calls are device steps, nobody else would see that a suspected worker is well again.
  losses_.judge_all(crew_.now());
  settle();
  return calls_.num_under_way() > 0 || choose_step_holders(crew_.links, layers_.all()).is_busy;
}

Result<StepLease> Engine::begin_step(uint32_t num_calls) {
  StepChoice choice = choose_step_holders(crew_.links, layers_.all());
  if (choice.error) return std::move(*choice.error);
  StepLease lease = step_.begin(crew_.links, std::move(choice), crew_.now());
  lease.first_call = calls_.take_ids(num_calls);
  return lease;
}

Status Engine::judge_step() {
  crew_.clock.look(now_ns());
  Status judged = losses_.judge_step(step_, layers_.all(), crew_.clock.at_last_look());
  settle();
  return judged;
}

void Engine::end_step(const StepResult& result) {
  step_.end(crew_.links, layers_.all(), result, crew_.clock.at_last_look());
  settle();
}

}  // namespace dflash::client
