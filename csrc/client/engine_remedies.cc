// Who is asked instead: slices that lost their worker find another holder, wait for one, or end
// their call; slices that are late are asked of a second holder as well.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "client/encode.h"
#include "client/engine.h"

namespace dflash::client {
namespace {

// A slice is sent so often at most. Within a call's deadline no honest worker comes back so often.
constexpr uint16_t kMostAttempts = 256;

bool fits(const Slice& slice, const transport::SlotGeometry& slot) {
  const LayerPlan& plan = slice.call->layer->plan;
  const uint64_t request =
      request_message_bytes(plan, slice.num_rows(), slice.num_pairs(), slice.request_dtype);
  const uint64_t reply = reply_message_bytes(plan, slice.num_rows(), slice.reply_dtype);
  return request <= slot.request_bytes && reply <= slot.reply_bytes;
}

}  // namespace

std::span<const uint32_t> Engine::holders_of(const Slice& slice) const {
  return slice.call->layer->holders[slice.shard_index];
}

// -- homes
// -----------------------------------------------------------------------------------------

// Takes a slice that nobody works at any more from its worker.
void Engine::make_homeless(Slice& slice, const Link& from) {
  slice.state = SliceState::kHomeless;
  ++num_homeless_;
  if (slice.troubles == nullptr) slice.troubles = std::make_unique<SliceTroubles>();
  slice.troubles->worker = from.index;
  slice.call->work->forecasts[slice.shard_index].is_alone = false;
}

void Engine::rehome_all(int64_t now) {
  if (num_homeless_ == 0) return;
  const std::vector<CallPtr> calls = calls_;  // a copy: calls that end leave calls_
  for (const CallPtr& call : calls) {
    if (!call->is_done && !call->is_parked) rehome(*call, now);
  }
}

void Engine::rehome(Call& call, int64_t now) {
  for (size_t i = 0; !call.is_done && i < call.work->slices.size(); ++i) {
    Slice& slice = call.work->slices[i];
    if (slice.state == SliceState::kHomeless) rehome_one(slice, now);
  }
}

// May end the slice's call.
void Engine::rehome_one(Slice& slice, int64_t now) {
  Call& call = *slice.call;
  SliceTroubles& troubles = *slice.troubles;
  if (Link* home = find_home(slice, now)) {
    end_parking(slice, now);
    --num_homeless_;
    return give(slice, *home, now);
  }
  const Outlook outlook =
      outlook_of(holders_of(slice), links_, now, options_.reconnect_grace_ns, troubles.refused_by);
  if (outlook != Outlook::kGone && slice.num_attempts < kMostAttempts) {
    if (troubles.parked_ns == 0) troubles.parked_ns = now;
    if (now - troubles.parked_ns <= options_.park_ns) return;
  }
  end_parking(slice, now);
  fail(call, homeless_error(slice));
}

// Puts a slice first among those that wait for a worker, which gets as much time as the first one
// had, within the patience of a call.
void Engine::give(Slice& slice, Link& home, int64_t now) {
  Call& call = *slice.call;
  slice.state = SliceState::kWaiting;
  slice.worker = home.index;
  home.waiting.push_front(slice);
  const int64_t latest = call.asked_ns + kMaxPatience * options_.call_timeout_ns;
  const int64_t until = now + limit_ns(home.backlog_ns());
  call.deadline_ns = std::max(call.deadline_ns, std::min(until, latest));
}

// Says what happened to a slice, and how those were lost that could not even be asked.
Error Engine::homeless_error(const Slice& slice) const {
  Error error = slice.troubles->error();
  for (const uint32_t holder : holders_of(slice)) {
    const Link& link = *links_[holder];
    const std::string lost = "worker " + link.name + " was lost: ";
    if (link.path.is_lost() && error.message.find(lost) == std::string::npos)
      error.message += "; " + lost + link.path.reason();
  }
  return error;
}

Link* Engine::find_home(Slice& slice, int64_t now) const {
  if (slice.num_attempts >= kMostAttempts) return nullptr;
  SliceTroubles& troubles = *slice.troubles;
  const auto holders = holders_of(slice);
  for (;;) {
    Link* link = pick_holder(holders, links_, troubles.refused_by);
    if (link == nullptr) return nullptr;
    // Not yet the last resort, as long as another holder may be back at once.
    if (link->is_last_resort && outlook_of(holders, links_, now, options_.reconnect_grace_ns,
                                           troubles.refused_by) != Outlook::kUsable)
      return nullptr;
    if (fits(slice, link->path.geometry())) return link;
    troubles.pass_over(link->index, "worker " + link->name + " has slots too small for the slice");
  }
}

void Engine::end_parking(Slice& slice, int64_t now) {
  SliceTroubles& troubles = *slice.troubles;
  if (troubles.parked_ns == 0) return;
  links_[troubles.worker]->counters[slice.call->layer->plan.layer].parked_ns +=
      now - troubles.parked_ns;
  troubles.parked_ns = 0;
}

// Whether a slice that waits at `from` has a better place.
bool Engine::can_move(const Slice& slice, const Link& from) const {
  const auto holders = holders_of(slice);
  const bool is_holder = std::find(holders.begin(), holders.end(), from.index) != holders.end();
  const bool can_stay =
      is_holder && from.can_send() && !from.is_suspect() && from.admission == Admission::kOpen;
  if (can_stay && !from.is_late()) return false;
  const std::span<const uint32_t> refused =
      slice.troubles == nullptr ? std::span<const uint32_t>() : slice.troubles->refused_by;
  const Link* other = pick_holder(holders, links_, refused, &from);
  if (other == nullptr || !fits(slice, other->path.geometry())) return false;
  if (from.answers_nothing()) return !other->is_distrusted();
  if (other->standing() != Standing::kWell || other->is_last_resort ||
      other->admission != Admission::kOpen)
    return false;
  // One that is merely late keeps what it is predicted to do sooner than the other.
  return !can_stay || other->backlog_ns() + slice.forecast_ns <= from.backlog_ns();
}

// Moves what waits at a worker that should not be asked to those that should.
void Engine::move_waiting(Link& link, int64_t now) {
  if (link.path.is_lost() || link.waiting.empty()) return;
  std::vector<Slice*> moved;
  for (Slice* slice : link.waiting.slices()) {
    if (can_move(*slice, link)) moved.push_back(slice);
  }
  link.waiting.take_out([&moved](const Slice& slice) {
    return std::find(moved.begin(), moved.end(), &slice) != moved.end();
  });
  for (Slice* slice : moved) make_homeless(*slice, link);
  rehome_all(now);
}

// Asks others for all that is asked of a worker which answers nothing. They need not have a free
// credit, as for a second request: nobody counts on this worker's answer any more.
void Engine::relieve(Link& link, int64_t now) {
  move_waiting(link, now);
  std::vector<Slice*> owed;
  for (const Slot& slot : link.path.slots()) {
    Slice* slice = slot.attempt.slice;
    if (slice != nullptr && slice->num_in_flight == 1) owed.push_back(slice);
  }
  for (Slice* slice : owed) {
    Link* other = find_untried(*slice);
    if (other == nullptr || other->is_distrusted()) continue;
    give_up_attempts(*slice);
    give(*slice, *other, now);
  }
}

// -- second requests
// -------------------------------------------------------------------------------

void Engine::hedge_all(int64_t now) {
  next_hedge_ns_ = std::numeric_limits<int64_t>::max();
  for (const auto& link : links_) {
    if (link->path.is_lost()) continue;
    link->look_for_late(now);
    for (uint32_t slot = 0; slot < link->path.slots().size(); ++slot) hedge(*link, slot, now);
    if (link->is_late()) move_waiting(*link, now);  // none of them needs to be asked twice for that
  }
}

// Sends the slice in a slot to a second holder if it is time. Sends never wait here: a holder
// without a free credit, or with a queue, would only be held up as well. A slice that found nobody
// is looked at again, because nothing that happens says when a holder is rid of its queue.
void Engine::hedge(Link& link, uint32_t slot, int64_t now) {
  const Attempt& attempt = link.path.slots()[slot].attempt;
  if (attempt.slice == nullptr || attempt.slice->is_hedged) return;
  Slice& slice = *attempt.slice;
  if (holders_of(slice).size() < 2) return;
  const auto look_again = [this](int64_t when) { next_hedge_ns_ = std::min(next_hedge_ns_, when); };
  if (!link.is_suspect() && !attempt.is_late(now)) {
    if (attempt.patience_ns > 0) look_again(attempt.asked_ns + attempt.patience_ns);
    return;
  }
  const std::span<const uint32_t> refused =
      slice.troubles == nullptr ? std::span<const uint32_t>() : slice.troubles->refused_by;
  Link* other = pick_holder(holders_of(slice), links_, refused, &link);
  if (other == nullptr || other->is_suspect()) return look_again(now + kTickNs);
  if (other->is_last_resort && !link.is_suspect()) return;
  if (!fits(slice, other->path.geometry())) return;
  const auto free = other->path.free_slot(other->window);
  if (!other->waiting.empty() || !free || (!link.is_suspect() && !hedge_budget_.spend()))
    return look_again(now + kLeastPatienceNs);
  slice.is_hedged = true;
  send(*other, slice, *free, true);
}

void Engine::begin_stall(Link& link) {
  link.begin_stall();
  next_hedge_ns_ = 0;  // what it owes is asked of others at once
}

// -- attempts that used up a call's time
// --------------------------------------------------------------------

// At a call's deadline its unanswered attempts have failed, as if they had been refused. Returns
// whether every slice has a holder that was not asked yet; they are asked then, and the call has a
// later deadline. Each of them is asked once, so that this ends, and never after the patience of a
// call.
bool Engine::ask_untried(Call& call, int64_t now) {
  const int64_t latest = call.asked_ns + kMaxPatience * options_.call_timeout_ns;
  if (call.is_parked || now >= latest) return false;
  int64_t until = 0;
  const auto is_hopeless = [&](const Slice& slice) {
    if (slice.state == SliceState::kArrived) return false;
    const int64_t hedged = hedged_until(slice);
    until = std::max(until, hedged);
    return hedged <= now && find_untried(slice) == nullptr;
  };
  auto& slices = call.work->slices;
  if (std::any_of(slices.begin(), slices.end(), is_hopeless)) return false;
  call.deadline_ns = std::max(call.deadline_ns, std::min(until, latest));
  for (Slice& slice : slices) {
    if (slice.state == SliceState::kArrived || hedged_until(slice) > now) continue;
    Link& next = *find_untried(slice);
    if (slice.state == SliceState::kHomeless) {  // such as one that waits for the grace to pass
      end_parking(slice, now);
      --num_homeless_;
    } else {
      give_up_attempts(slice);
    }
    give(slice, next, now);
  }
  return true;
}

// A second request may have been sent shortly before the deadline. Returns until when its holder
// may take, 0 where none is under way.
int64_t Engine::hedged_until(const Slice& slice) const {
  int64_t until = 0;
  for (const auto& link : links_) {
    for (const Slot& slot : link->path.slots()) {
      const Attempt& attempt = slot.attempt;
      if (attempt.slice == &slice && attempt.is_hedge)
        until = attempt.asked_ns + std::max(options_.call_timeout_ns, attempt.patience_ns);
    }
  }
  return until;
}

// Returns a holder that can be asked and was not: the slice neither waits nor is under way there,
// and was not refused there. Null where there is none.
Link* Engine::find_untried(const Slice& slice) const {
  std::vector<uint32_t> tried;
  if (slice.troubles != nullptr) tried = slice.troubles->refused_by;
  if (slice.state == SliceState::kWaiting) tried.push_back(slice.worker);
  for (const auto& link : links_) {
    if (link->path.has_in_flight(slice)) tried.push_back(link->index);
  }
  for (;;) {
    Link* link = pick_holder(holders_of(slice), links_, tried);
    if (link == nullptr || fits(slice, link->path.geometry())) return link;
    tried.push_back(link->index);
  }
}

// Takes a slice from those who had it, and who will not be asked for it again.
void Engine::give_up_attempts(Slice& slice) {
  const LayerPlan& plan = slice.call->layer->plan;
  if (slice.troubles == nullptr) slice.troubles = std::make_unique<SliceTroubles>();
  for (const auto& link : links_) {
    const bool is_under_way = link->path.has_in_flight(slice);
    const bool has_waited = slice.state == SliceState::kWaiting && slice.worker == link->index;
    if (!is_under_way && !has_waited) continue;
    link->waiting.take_out([&slice](const Slice& one) { return &one == &slice; });
    link->supersede(slice);
    link->counters[plan.layer].failovers += is_under_way ? 1 : 0;
    slice.troubles->worker = link->index;
    slice.troubles->refused_by.push_back(link->index);
    slice.troubles->add(
        Error{ErrorCode::kTimeout,
              "worker " + link->name + " did not answer layer " + plan.name + " in its time"}
            .at({link->name, plan.layer, {}, {}}));
  }
  slice.num_in_flight = 0;
  slice.is_hedged = false;
  slice.call->work->forecasts[slice.shard_index].is_alone = false;
}

// -- what is said about workers
// --------------------------------------------------------------------

void Engine::set_admission(Link& link, Admission admission) {
  link.admission = admission;
  move_waiting(link, now());
  rehome_all(now());
  admit_parked();
  pump();
  link.tell_if_idle();
}

void Engine::set_remedy(Link& link, bool has_remedy) {
  link.has_remedy = has_remedy;
  if (has_remedy) return;
  rehome_all(now());  // nobody waits for it any more
  admit_parked();
}

}  // namespace dflash::client
