// Slices are few, and so are holders: each look passes over all of them.
// SPDX-License-Identifier: Apache-2.0
#include "client/remedies.h"

#include <algorithm>

namespace dflash::client {
namespace {

// A slice is sent so often at most. Within a call's deadline no honest worker comes back so often.
constexpr uint16_t kMostAttempts = 256;

}  // namespace

// -- homes --

void Remedies::rehome_all(int64_t now) {
  if (!calls_.has_homeless()) return;
  const std::vector<CallPtr> calls(calls_.all().begin(), calls_.all().end());  // some may end
  for (const CallPtr& call : calls) {
    if (call->is_parked) continue;
    for (size_t i = 0; !call->is_done && i < call->work->slices.size(); ++i) {
      Slice& slice = call->work->slices[i];
      if (slice.state == SliceState::kHomeless) rehome(slice, now);
    }
  }
}

// May end the slice's call.
void Remedies::rehome(Slice& slice, int64_t now) {
  SliceTroubles& troubles = *slice.troubles;
  if (Link* home = find_home(slice, now)) {
    end_parking(slice, now);
    return calls_.give(slice, *home, now);
  }
  const Outlook outlook = outlook_of(slice.holders(), crew_.links, now,
                                     crew_.options.reconnect_grace_ns, troubles.refused_by);
  if (outlook != Outlook::kGone && slice.num_attempts < kMostAttempts) {
    if (troubles.parked_ns == 0) troubles.parked_ns = now;
    if (now - troubles.parked_ns <= crew_.options.park_ns) return;
  }
  end_parking(slice, now);
  calls_.fail(*slice.call, homeless_error(slice));
}

Error Remedies::homeless_error(const Slice& slice) const {
  Error error = slice.troubles->error();
  for (const uint32_t holder : slice.holders()) {
    const Link& link = *crew_.links[holder];
    const std::string lost = "worker " + link.name + " was lost: ";
    if (link.path.is_lost() && error.message.find(lost) == std::string::npos)
      error.message += "; " + lost + link.path.reason();
  }
  return error;
}

Link* Remedies::find_home(Slice& slice, int64_t now) const {
  if (slice.num_attempts >= kMostAttempts) return nullptr;
  SliceTroubles& troubles = *slice.troubles;
  const auto holders = slice.holders();
  for (;;) {
    Link* link = pick_holder(holders, crew_.links, troubles.refused_by);
    if (link == nullptr) return nullptr;
    // Not yet the last resort, as long as another holder may be back at once.
    if (link->is_last_resort &&
        outlook_of(holders, crew_.links, now, crew_.options.reconnect_grace_ns,
                   troubles.refused_by) != Outlook::kUsable)
      return nullptr;
    if (fits(slice, link->path.geometry())) return link;
    troubles.pass_over(link->index, "worker " + link->name + " has slots too small for the slice");
  }
}

void Remedies::end_parking(Slice& slice, int64_t now) {
  SliceTroubles& troubles = *slice.troubles;
  if (troubles.parked_ns == 0) return;
  crew_.links[troubles.worker]->counters[slice.call->layer->plan.layer].parked_ns +=
      now - troubles.parked_ns;
  troubles.parked_ns = 0;
}

// Whether a slice that waits at `from` has a better place.
bool Remedies::can_move(const Slice& slice, const Link& from) const {
  const auto holders = slice.holders();
  const bool is_holder = std::find(holders.begin(), holders.end(), from.index) != holders.end();
  const bool can_stay =
      is_holder && from.can_send() && !from.is_suspect() && from.admission == Admission::kOpen;
  if (can_stay && !from.is_late()) return false;
  const Link* other = pick_holder(holders, crew_.links, slice.refused_by(), &from);
  if (other == nullptr || !fits(slice, other->path.geometry())) return false;
  if (from.answers_nothing()) return !other->is_distrusted();
  if (other->standing() != Standing::kWell || other->is_last_resort ||
      other->admission != Admission::kOpen)
    return false;
  // One that is merely late keeps what it is predicted to do sooner than the other.
  return !can_stay || other->backlog_ns() + slice.forecast_ns <= from.backlog_ns();
}

void Remedies::move_waiting(Link& link, int64_t now) {
  if (link.path.is_lost() || link.waiting.empty()) return;
  std::vector<Slice*> moved;
  for (Slice* slice : link.waiting.slices()) {
    if (can_move(*slice, link)) moved.push_back(slice);
  }
  link.waiting.take_out([&moved](const Slice& slice) {
    return std::find(moved.begin(), moved.end(), &slice) != moved.end();
  });
  for (Slice* slice : moved) calls_.make_homeless(*slice, link);
  rehome_all(now);
}

void Remedies::relieve(Link& link, int64_t now) {
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
    calls_.give(*slice, *other, now);
  }
}

// -- second requests --

std::optional<BrokenLink> Remedies::hedge_all(int64_t now) {
  late_watch_.clear();
  for (const auto& link : crew_.links) {
    if (link->path.is_lost()) continue;
    link->look_for_late(now);
    for (uint32_t slot = 0; slot < link->path.slots().size(); ++slot) {
      Link* other = find_second(*link, link->path.slots()[slot].attempt, now);
      if (other == nullptr) continue;
      Slice& slice = *link->path.slots()[slot].attempt.slice;
      slice.is_hedged = true;
      Status sent = sending_.send(*other, slice, *other->path.free_slot(other->window), true);
      if (!sent.ok()) return BrokenLink{other, std::move(sent).error()};
    }
    if (link->is_late()) move_waiting(*link, now);  // none of them needs to be asked twice for that
  }
  return std::nullopt;
}

// Returns who is asked for a slice besides `link`, if it is time; null otherwise. Second requests
// never wait: a holder without a free credit, or with a queue, would only be held up as well. A
// slice that found nobody is looked at again, because nothing that happens says when a holder is
// rid of its queue.
Link* Remedies::find_second(const Link& link, const Attempt& attempt, int64_t now) {
  if (attempt.slice == nullptr || attempt.slice->is_hedged) return nullptr;
  const Slice& slice = *attempt.slice;
  if (slice.holders().size() < 2) return nullptr;
  const auto look_by = [this](int64_t when) {
    late_watch_.look_by(when);
    return nullptr;
  };
  if (!link.is_suspect() && !attempt.is_late(now)) {
    return attempt.patience_ns > 0 ? look_by(attempt.asked_ns + attempt.patience_ns) : nullptr;
  }
  Link* other = pick_holder(slice.holders(), crew_.links, slice.refused_by(), &link);
  if (other == nullptr || other->is_suspect()) return look_by(now + kTickNs);
  if (other->is_last_resort && !link.is_suspect()) return nullptr;
  if (!fits(slice, other->path.geometry())) return nullptr;
  if (!other->waiting.empty() || !other->path.free_slot(other->window) ||
      (!link.is_suspect() && !hedge_budget_.spend()))
    return look_by(now + kLeastPatienceNs);
  return other;
}

// -- attempts that used up a call's time --

bool Remedies::ask_untried(Call& call, int64_t now) {
  if (!late_watch_.is_on() || call.is_parked || now >= calls_.latest_ns(call)) return false;
  int64_t until = 0;
  const auto is_hopeless = [&](const Slice& slice) {
    if (slice.state == SliceState::kArrived) return false;
    const int64_t hedged = hedged_until(slice);
    until = std::max(until, hedged);
    return hedged <= now && find_untried(slice) == nullptr;
  };
  auto& slices = call.work->slices;
  if (std::any_of(slices.begin(), slices.end(), is_hopeless)) return false;
  calls_.extend(call, until);
  for (Slice& slice : slices) {
    if (slice.state == SliceState::kArrived || hedged_until(slice) > now) continue;
    // What was given up for a slice before this one may have worn out the path of its only holder
    // that was not asked. Then it waits until that path is renewed.
    Link* const next = find_untried(slice);
    const bool is_homeless = slice.state == SliceState::kHomeless;
    if (!is_homeless) give_up_attempts(slice);
    if (next == nullptr) {
      if (!is_homeless) calls_.make_homeless(slice, *crew_.links[slice.worker]);
      continue;
    }
    if (is_homeless) end_parking(slice, now);  // such as one that waits for the grace to pass
    calls_.give(slice, *next, now);
  }
  return true;
}

// A second request may have been sent shortly before the deadline. Returns until when its holder
// may take, 0 where none is under way.
int64_t Remedies::hedged_until(const Slice& slice) const {
  int64_t until = 0;
  for (const auto& link : crew_.links) {
    for (const Slot& slot : link->path.slots()) {
      const Attempt& attempt = slot.attempt;
      if (attempt.slice == &slice && attempt.is_hedge)
        until = attempt.asked_ns + std::max(crew_.options.call_timeout_ns, attempt.patience_ns);
    }
  }
  return until;
}

// Returns a holder that can be asked and was not: the slice neither waits nor is under way there,
// and was not refused there. Null where there is none.
Link* Remedies::find_untried(const Slice& slice) const {
  std::vector<uint32_t> tried(slice.refused_by().begin(), slice.refused_by().end());
  if (slice.state == SliceState::kWaiting) tried.push_back(slice.worker);
  for (const auto& link : crew_.links) {
    if (link->path.has_in_flight(slice)) tried.push_back(link->index);
  }
  for (;;) {
    Link* link = pick_holder(slice.holders(), crew_.links, tried);
    if (link == nullptr || fits(slice, link->path.geometry())) return link;
    tried.push_back(link->index);
  }
}

// Takes a slice from those who had it, and who will not be asked for it again.
void Remedies::give_up_attempts(Slice& slice) {
  const LayerPlan& plan = slice.call->layer->plan;
  SliceTroubles& troubles = slice.trouble();
  for (const auto& link : crew_.links) {
    const bool is_under_way = link->path.has_in_flight(slice);
    const bool has_waited = slice.state == SliceState::kWaiting && slice.worker == link->index;
    if (!is_under_way && !has_waited) continue;
    link->waiting.take_out([&slice](const Slice& one) { return &one == &slice; });
    link->supersede(slice);
    link->counters[plan.layer].failovers += is_under_way ? 1 : 0;
    troubles.worker = link->index;
    troubles.refused_by.push_back(link->index);
    troubles.add(Error{ErrorCode::kTimeout, "worker " + link->name + " did not answer layer " +
                                                plan.name + " in its time"}
                     .at({link->name, plan.layer, {}, {}}));
  }
  slice.num_in_flight = 0;
  slice.is_hedged = false;
  slice.call->work->forecasts[slice.shard_index].is_alone = false;
}

}  // namespace dflash::client
