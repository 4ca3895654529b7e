// Judging is rare, every 20 ms at most, so that it passes over all workers and all that they owe.
// SPDX-License-Identifier: Apache-2.0
#include "client/losses.h"

#include <algorithm>
#include <iterator>

namespace dflash::client {

// A slice that is under way at another holder too just goes on there.
void Losses::lose(Link& link, const Error& why) {
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
      remedies_.look_at_once();
    }
  }
  link.waiting.take_out([&taken](Slice& slice) {
    taken.push_back(&slice);
    return true;
  });
  const int64_t now = crew_.now();
  link.lose(why.message, now);
  for (Slice* slice : taken) {
    Error error = link.lost_error(*slice->call->layer);
    error.code = why.code;
    calls_.make_homeless(*slice, link);
    slice->troubles->add(std::move(error));
  }
  remedies_.rehome_all(now);
  calls_.admit_parked();
}

void Losses::lose_after_drain(Link& link, const std::string& reason) {
  if (link.path.state() != PathState::kLeased) drain(link);
  lose(link, {ErrorCode::kWorkerLost, reason});
}

void Losses::drain(Link& link) {
  if (Status drained = answers_.drain(link); !drained.ok()) lose(link, drained.error());
}

void Losses::judge_if_due(int64_t real_now) {
  if (real_now - last_judged_ns_ > kTickNs) judge_all(crew_.clock.at(real_now));
}

void Losses::judge_all(int64_t now) {
  last_judged_ns_ = now_ns();
  for (const auto& link : crew_.links) judge(*link, now);
}

// A worker that owes nothing rests: it has nothing to make progress with, and its counter may stand
// still. There are two exceptions, both for a worker whose slices others have answered meanwhile.
// One that is suspected of a stall is watched until its counter moves: if it were trusted again
// because it owes nothing, the next call would go there and wait just as long. One whose own answer
// has not come yet (it is late) is watched until it has: if its connection is cut, nothing but its
// counter shows that it has to be dialled anew.
void Losses::judge(Link& link, int64_t now) {
  const PathState state = link.path.state();
  if (state == PathState::kLost || state == PathState::kLeased) return;  // judge_step() does it
  if (const auto failure = link.liveness.read_pulses(now)) return lose_after_drain(link, *failure);
  judge_silence(link, now);
  if (link.path.is_lost()) return;
  link.end_stall_if_it_moved();
  // What waits there may wait long: where others have answered for it until no slot was left, only
  // its late replies would free one.
  if (link.standing() != Standing::kWell || !link.can_send()) remedies_.move_waiting(link, now);
  if (!link.owes() && !link.is_stalled() && !link.is_late() && link.waiting.empty())
    return link.liveness.rest();
  if (!link.owes()) link.liveness.begin_to_wait(now);
  if (link.is_suspect())
    remedies_.look_at_once();  // what it owes is asked of whoever can be asked now
  if (link.liveness.is_stalled(now, crew_.options.stall_timeout_ns)) {
    const uint32_t num_owed = link.path.num_in_flight();
    drain(link);
    if (!link.path.is_lost() && link.path.num_in_flight() == num_owed)
      lose(link, {ErrorCode::kWorkerLost, link.liveness.stall_text(now)});
  } else if (!link.is_stalled() && link.liveness.is_stalled(now, crew_.options.suspect_ns)) {
    link.begin_stall();
    remedies_.look_at_once();  // what it owes is asked of others
    remedies_.move_waiting(link, now);
  }
}

void Losses::judge_silence(Link& link, int64_t now) {
  const auto lasts = [&](int64_t limits) {
    return link.silence().lasts_ns(now) >
           limits * link.silence_limit_ns(crew_.options.call_timeout_ns);
  };
  if (!link.liveness.is_judged()) return;
  if (lasts(1)) drain(link);  // an answer may just have come
  if (link.path.is_lost()) return;
  if (lasts(2)) {
    const char* pulse = link.is_stalled() ? "" : " although its pulse goes on";
    return lose(link, {ErrorCode::kWorkerLost,
                       std::string("answers nothing") + pulse + ": no whole answer for " +
                           seconds_text(link.silence().lasts_ns(now)) +
                           "; raise ipc.call_timeout_s if it is only slow"});
  }
  if (lasts(1) && !link.is_distrusted()) link.distrust();
  if (link.answers_nothing()) remedies_.relieve(link, now);
}

void Losses::end_late_calls(int64_t now) {
  const auto is_late = [now](const CallPtr& call) { return now >= call->deadline_ns; };
  if (std::none_of(calls_.all().begin(), calls_.all().end(), is_late)) return;
  for (const auto& link : crew_.links) drain(*link);  // what has come by now counts
  std::vector<CallPtr> late;
  std::copy_if(calls_.all().begin(), calls_.all().end(), std::back_inserter(late), is_late);
  for (const CallPtr& call : late) {
    if (call->is_done) continue;
    if (remedies_.ask_untried(*call, now)) continue;
    if (!await_verdict(*call, now)) calls_.fail(*call, late_error(*call));
  }
}

// At its deadline, a call for which all workers that owe it something have answered nothing goes on
// where stand-ins may come for them: until they are given up, and as long as it may then wait for
// another holder. Returns whether it does.
bool Losses::await_verdict(Call& call, int64_t now) {
  if (call.is_parked || now >= calls_.latest_ns(call)) return false;
  int64_t until = 0;
  for (const Slice& slice : call.work->slices) {
    if (slice.state == SliceState::kArrived) continue;
    const Link& link = *crew_.links[slice.worker];
    const bool is_asked =
        slice.state == SliceState::kInFlight || slice.state == SliceState::kWaiting;
    if (!is_asked || !link.may_have_stand_in || !link.liveness.is_judged() ||
        link.silence().has_heard_since(call.asked_ns))
      return false;
    const int64_t verdict = now + 2 * link.silence_limit_ns(crew_.options.call_timeout_ns) -
                            link.silence().lasts_ns(now);
    until = std::max(until, verdict + crew_.options.park_ns);
  }
  calls_.extend(call, until);
  return call.deadline_ns > now;
}

Error Losses::late_error(const Call& call) const {
  const LayerPlan& plan = call.layer->plan;
  const std::string limit = seconds_text(call.deadline_ns - call.asked_ns);
  if (!call.is_parked) {
    const auto& slices = call.work->slices;
    const auto owed = std::find_if(slices.begin(), slices.end(), [](const Slice& slice) {
      return slice.state != SliceState::kArrived;
    });
    if (owed->state == SliceState::kHomeless)
      return remedies_.homeless_error(*owed).with("layer " + plan.name +
                                                  " found no other holder in " + limit);
    const std::string& name = crew_.links[owed->worker]->name;
    Error error{ErrorCode::kTimeout, "worker " + name + " did not answer layer " + plan.name +
                                         " within " + limit +
                                         "; raise ipc.call_timeout_s if it is only slow"};
    if (owed->troubles != nullptr) error.message += "; before that: " + owed->troubles->all_told();
    return std::move(error).at({name, plan.layer, {}, {}});
  }
  std::string what = "a change of mode or a device step of another thread to end";
  ErrorPlace place{{}, plan.layer, {}, {}};
  for (size_t s = 0; s < call.layer->holders.size() && place.worker.empty(); ++s) {
    if (call.work->shard_rows[s].tokens.empty()) continue;
    for (const uint32_t holder : call.layer->holders[s]) {
      const Link& link = *crew_.links[holder];
      const PathState state = link.path.state();
      if (state != PathState::kLeased && state != PathState::kWorn) continue;
      what = state == PathState::kLeased
                 ? "a device step to give back the data path of worker " + link.name +
                       "; leave the step sooner"
                 : "a fresh data path to worker " + link.name + " (" + link.path.reason() + ")";
      place.worker = link.name;
      break;
    }
  }
  return Error{ErrorCode::kTimeout, "layer " + plan.name + " waited " + limit + " for " + what}.at(
      place);
}

Status Losses::judge_step(const OpenStep& step, const std::map<uint32_t, Layer>& layers,
                          int64_t now) {
  for (const auto& link : crew_.links) drain(*link);
  judge_all(now);  // those that are not lent, who may be asked instead
  for (const StepPath& path : step.paths()) {
    Link& link = *crew_.links[path.worker];
    if (step.has(link, path)) {
      if (const auto failure = link.liveness.read_pulses(now)) {
        lose(link, {ErrorCode::kWorkerLost, *failure});
      } else if (link.liveness.is_stalled(now, crew_.options.stall_timeout_ns)) {
        lose(link, {ErrorCode::kWorkerLost, link.liveness.stall_text(now)});
      } else if (link.liveness.is_stalled(now, crew_.options.suspect_ns) &&
                 step.has_stand_in(link, crew_.links, layers)) {
        if (!link.is_stalled()) link.begin_stall();
        remedies_.look_at_once();
        return link.error(ErrorCode::kTimeout, "showed " + link.liveness.stall_text(now) +
                                                   ", and others hold its experts");
      }
    }
    if (!step.has(link, path)) {
      const std::string why = link.path.is_lost() ? link.path.reason() : "another took its place";
      return link.error(ErrorCode::kWorkerLost, "was lost: " + why);
    }
  }
  return ok();
}

}  // namespace dflash::client
