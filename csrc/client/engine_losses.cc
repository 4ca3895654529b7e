// When the engine gives up a call, a worker or a data path, and how a path or a worker comes back.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "client/engine.h"

namespace dflash::client {

void Engine::fail(Call& call, Error error) {
  if (call.is_done) return;
  call.error = std::move(error);
  for (const auto& link : links_) {
    link->waiting.drop(call);
    link->path.quarantine_all_of(call);
  }
  end(call);
}

// What the worker owed, and what waited for it, loses its home, and then finds another holder,
// waits for one, or ends its call. A slice that is under way at another holder too just goes on
// there.
void Engine::lose(Link& link, ErrorCode code, const std::string& reason) {
  if (link.path.is_lost()) return;
  std::vector<Slice*> taken;
  for (const Slot& slot : link.path.slots()) {
    Slice* slice = slot.attempt.slice;
    if (slice == nullptr) continue;
    ++link.counters[slice->call->layer->plan.layer].failovers;
    if (--slice->num_in_flight == 0) {
      taken.push_back(slice);
    } else {  // the one that is left may be late in its turn
      slice->is_hedged = false;
      next_hedge_ns_ = 0;
    }
  }
  link.waiting.take_out([&taken](Slice& slice) {
    taken.push_back(&slice);
    return true;
  });
  link.lose(reason, now());
  for (Slice* slice : taken) {
    Error error = link.lost_error(*slice->call->layer);
    error.code = code;
    make_homeless(*slice, link);
    slice->troubles->add(std::move(error));
  }
  rehome_all(link.lost_ns());
  admit_parked();
}

void Engine::lose_after_drain(Link& link, const std::string& reason) {
  if (link.path.state() != PathState::kLeased) drain(link);
  lose(link, ErrorCode::kWorkerLost, reason);
  pump();
}

void Engine::judge_if_due(int64_t real_now) {
  if (real_now - last_judged_ns_ > kTickNs) judge_all(clock_.at(real_now));
}

void Engine::judge_all(int64_t now) {
  last_judged_ns_ = now_ns();
  for (const auto& link : links_) judge(*link, now);
}

// A worker is given up by the first of three grounds: its pulses end, its progress counter stands
// still, it answers nothing.
//
// One that owes nothing any more, because others answered for it, is still expected to show
// progress while it is suspected of a stall, or has not given its own answer: otherwise it would be
// asked again, and hold up the next call as long, or would be behind a cut link and never be
// dialled.
void Engine::judge(Link& link, int64_t now) {
  const PathState state = link.path.state();
  if (state == PathState::kLost || state == PathState::kLeased) return;  // see judge_step()
  if (const auto failure = link.liveness.read_pulses(now)) return lose_after_drain(link, *failure);
  judge_silence(link, now);
  if (link.path.is_lost()) return;
  link.end_stall_if_it_moved();
  // What waits there may wait long: where others have answered for it until no slot was left, only
  // its late replies would free one.
  if (link.standing() != Standing::kWell || !link.can_send()) move_waiting(link, now);
  if (!link.owes() && !link.is_stalled() && !link.is_late() && link.waiting.empty())
    return link.liveness.rest();
  if (!link.owes()) link.liveness.begin_to_wait(now);
  if (link.is_suspect()) next_hedge_ns_ = 0;  // what it owes is asked of whoever can be asked now
  if (link.liveness.is_stalled(now, options_.stall_timeout_ns)) {
    const uint32_t num_owed = link.path.num_in_flight();
    drain(link);
    if (!link.path.is_lost() && link.path.num_in_flight() == num_owed)
      lose(link, ErrorCode::kWorkerLost, link.liveness.stall_text(now));
  } else if (!link.is_stalled() && link.liveness.is_stalled(now, options_.suspect_ns)) {
    begin_stall(link);
    move_waiting(link, now);
  }
}

int64_t Engine::pulse_age_ns(Link& link) {
  judge(link, now());
  return now_ns() - link.liveness.last_pulse_ns();
}

void Engine::judge_silence(Link& link, int64_t now) {
  const auto lasts = [&](int64_t limits) {
    return link.silent_ns(now) > limits * link.silence_limit_ns(options_.call_timeout_ns);
  };
  if (!link.liveness.is_judged()) return;
  if (lasts(1)) drain(link);  // an answer may just have come
  if (link.path.is_lost()) return;
  if (lasts(2)) {
    const char* pulse = link.is_stalled() ? "" : " although its pulse goes on";
    return lose(link, ErrorCode::kWorkerLost,
                std::string("answers nothing") + pulse + ": no whole answer for " +
                    seconds_text(link.silent_ns(now)) +
                    "; raise ipc.call_timeout_s if it is only slow");
  }
  if (lasts(1) && !link.is_distrusted()) link.distrust();
  if (link.answers_nothing()) relieve(link, now);
}

// What has arrived by now counts, however late it is looked at.
void Engine::end_late_calls(int64_t now) {
  const auto is_late = [now](const CallPtr& call) { return now >= call->deadline_ns; };
  if (std::none_of(calls_.begin(), calls_.end(), is_late)) return;
  drain_all();
  std::vector<CallPtr> late;
  std::copy_if(calls_.begin(), calls_.end(), std::back_inserter(late), is_late);
  for (const CallPtr& call : late) {
    if (call->is_done) continue;
    if (has_replicas_ && ask_untried(*call, now)) continue;
    if (!await_verdict(*call, now)) fail(*call, late_error(*call));
  }
}

// At its deadline, a call for which all workers that owe it something have answered nothing goes on
// where stand-ins may come for them: until they are given up, and as long as it may then wait for
// another holder. Returns whether it does.
bool Engine::await_verdict(Call& call, int64_t now) {
  const int64_t latest = call.asked_ns + kMaxPatience * options_.call_timeout_ns;
  if (call.is_parked || now >= latest) return false;
  int64_t until = 0;
  for (const Slice& slice : call.work->slices) {
    if (slice.state == SliceState::kArrived) continue;
    const Link& link = *links_[slice.worker];
    const bool is_asked =
        slice.state == SliceState::kInFlight || slice.state == SliceState::kWaiting;
    if (!is_asked || !link.may_have_stand_in || !link.liveness.is_judged() ||
        link.has_answered_since(call.asked_ns))
      return false;
    const int64_t verdict =
        now + 2 * link.silence_limit_ns(options_.call_timeout_ns) - link.silent_ns(now);
    until = std::max(until, verdict + options_.park_ns);
  }
  call.deadline_ns = std::max(call.deadline_ns, std::min(until, latest));
  return call.deadline_ns > now;
}

Error Engine::late_error(const Call& call) const {
  const LayerPlan& plan = call.layer->plan;
  const std::string limit = seconds_text(call.deadline_ns - call.asked_ns);
  if (!call.is_parked) {
    const auto& slices = call.work->slices;
    const auto owed = std::find_if(slices.begin(), slices.end(), [](const Slice& slice) {
      return slice.state != SliceState::kArrived;
    });
    if (owed->state == SliceState::kHomeless)
      return homeless_error(*owed).with("layer " + plan.name + " found no other holder in " +
                                        limit);
    const std::string& name = links_[owed->worker]->name;
    Error error{ErrorCode::kTimeout, "worker " + name + " did not answer layer " + plan.name +
                                         " within " + limit +
                                         "; raise ipc.call_timeout_s if it is only slow"};
    if (owed->troubles != nullptr) error.message += "; before that: " + owed->troubles->all_told();
    return std::move(error).at({name, plan.layer, {}, {}});
  }
  const std::string waited = "layer " + plan.name + " waited " + limit;
  for (size_t s = 0; s < call.layer->holders.size(); ++s) {
    if (call.work->shard_rows[s].tokens.empty()) continue;
    for (const uint32_t holder : call.layer->holders[s]) {
      const Link& link = *links_[holder];
      const ErrorPlace place{link.name, plan.layer, {}, {}};
      if (link.path.state() == PathState::kLeased) {
        return Error{ErrorCode::kTimeout,
                     waited + " for a device step to give back the data path of worker " +
                         link.name + "; leave the step sooner"}
            .at(place);
      }
      if (link.path.state() == PathState::kWorn) {
        return Error{ErrorCode::kTimeout, waited + " for a fresh data path to worker " + link.name +
                                              " (" + link.path.reason() + ")"}
            .at(place);
      }
    }
  }
  return Error{ErrorCode::kTimeout,
               waited + " for a change of mode or a device step of another thread to end"}
      .at({{}, plan.layer, {}, {}});
}

Status Engine::check_idle(const Link& link) const {
  const ErrorPlace here{link.name, {}, {}, {}};
  if (link.path.is_lost()) {
    return Error{ErrorCode::kWorkerLost, "worker " + link.name + " is lost: " + link.path.reason()}
        .at(here);
  }
  if (link.path.owes() || link.path.state() == PathState::kLeased) {
    return Error{ErrorCode::kInvalidArgument, "the data path of worker " + link.name +
                                                  " is in use; wait until nothing is under way"}
        .at(here);
  }
  return ok();
}

Status Engine::retire_path(Link& link, const std::string& reason) {
  DFLASH_TRY(check_idle(link));
  if (link.path.is_retired()) {
    return Error{ErrorCode::kInvalidArgument,
                 "the data path of worker " + link.name + " is being renewed already"}
        .at({link.name, {}, {}, {}});
  }
  link.path.retire(reason);
  return ok();
}

Status Engine::renew_path(Link& link, NewPath path) {
  DFLASH_TRY(check_idle(link));
  link.renew(std::move(path), now(), options_.call_timeout_ns);
  rehome_all(now());
  admit_parked();
  pump();
  return ok();
}

Status Engine::replace_worker(Link& link, NewPath path, OwnedFd pulse) {
  const auto refuse = [&link](const std::string& why) {
    return Error{ErrorCode::kInvalidArgument, "worker " + link.name + " cannot be replaced: " + why}
        .at({link.name, {}, {}, {}});
  };
  if (!link.path.is_lost())
    return refuse("it is not lost; renew its data path, or mark it lost first");
  if (path.generation == link.path.generation())
    return refuse("its fresh path has the generation of the lost one");
  link.replace(std::move(path), std::move(pulse));
  rehome_all(now());
  admit_parked();
  pump();
  return ok();
}

void Engine::wear_out_unfit() {
  for (const auto& link : links_) {
    // The late reply of a worker that is suspected frees a slot, or the worker is given up.
    if (link->path.num_quarantined() > 0 && !link->is_suspect())
      link->path.wear_out("a device step needs all of its slots");
  }
}

std::vector<WornPath> Engine::retire_worn_paths() {
  std::vector<WornPath> retired;
  for (uint32_t index = 0; index < links_.size(); ++index) {
    Path& path = links_[index]->path;
    if (!path.is_ready_to_retire()) continue;
    retired.push_back({index, path.reason()});
    path.retire(path.reason());
  }
  return retired;
}

bool Engine::has_path_to_retire() const {
  return std::any_of(links_.begin(), links_.end(),
                     [](const auto& link) { return link->path.is_ready_to_retire(); });
}

bool Engine::must_step_wait() {
  // Where all calls are device steps, nobody else would see that a suspected worker is well again.
  judge_all(now());
  return num_under_way() > 0 || choose_step_holders(links_, layers_).is_busy;
}

Result<StepLease> Engine::begin_step(uint32_t num_calls) {
  StepChoice choice = choose_step_holders(links_, layers_);
  if (choice.error) return std::move(*choice.error);
  StepLease lease = step_.begin(links_, std::move(choice), now());
  lease.first_call = next_call_id_;
  next_call_id_ += num_calls;
  return lease;
}

// What is asked of one worker in a step is asked of no other, so that a suspected one ends the step
// where another holder can answer the same calls outside of it.
Status Engine::judge_step() {
  const int64_t real_now = now_ns();
  clock_.look(real_now);
  drain_all();
  const int64_t now = clock_.at(real_now);
  judge_all(now);  // those that are not lent, who may be asked instead
  for (const StepPath& path : step_.paths()) {
    Link& link = *links_[path.worker];
    const ErrorPlace here{link.name, {}, {}, {}};
    if (step_.has(link, path)) {
      if (const auto failure = link.liveness.read_pulses(now)) {
        lose(link, ErrorCode::kWorkerLost, *failure);
      } else if (link.liveness.is_stalled(now, options_.stall_timeout_ns)) {
        lose(link, ErrorCode::kWorkerLost, link.liveness.stall_text(now));
      } else if (link.liveness.is_stalled(now, options_.suspect_ns) &&
                 step_.has_stand_in(link, links_, layers_)) {
        if (!link.is_stalled()) begin_stall(link);
        return Error{ErrorCode::kTimeout, "worker " + link.name + " showed " +
                                              link.liveness.stall_text(now) +
                                              ", and others hold its experts"}
            .at(here);
      }
    }
    if (!step_.has(link, path)) {
      const std::string reason =
          link.path.is_lost() ? link.path.reason() : "another took its place";
      return Error{ErrorCode::kWorkerLost, "worker " + link.name + " was lost: " + reason}.at(here);
    }
  }
  return ok();
}

void Engine::end_step(const StepResult& result) {
  const std::vector<StepPath> paths(step_.paths().begin(), step_.paths().end());
  step_.end(links_, layers_, result);
  for (const StepMessage& message : result.answered) {
    if (Link* answering = link(message.worker)) answering->hear(clock_.at_last_look());
  }
  for (const StepPath& path : paths) links_[path.worker]->tell_if_idle();
  admit_parked();
  pump();
}

}  // namespace dflash::client
