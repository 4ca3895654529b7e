// A data path does not store its state, which follows from a few flags and the credits of its
// slots.
// SPDX-License-Identifier: Apache-2.0
#include "client/path.h"

#include <algorithm>
#include <utility>

namespace dflash::client {

const char* path_state_name(PathState state) {
  switch (state) {
    case PathState::kFresh:  return "fresh";
    case PathState::kInUse:  return "in use";
    case PathState::kWorn:   return "worn";
    case PathState::kLeased: return "leased";
    case PathState::kLost:   return "lost";
  }
  return "unknown";
}

Path::Path(NewPath path) { renew(std::move(path)); }

PathState Path::state() const {
  if (channel_ == nullptr) return PathState::kLost;
  if (is_leased_) return PathState::kLeased;
  if (is_worn_ || lacks_slots()) return PathState::kWorn;
  return has_sent_ ? PathState::kInUse : PathState::kFresh;
}

std::string Path::reason() const {
  if (!reason_.empty() || !lacks_slots()) return reason_;
  return std::to_string(num_quarantined_) + " of its " + std::to_string(slots_.size()) +
         " slots wait for replies that are late";
}

void Path::renew(NewPath path) {
  lose("");
  channel_ = std::move(path.channel);
  generation_ = path.generation;
  slots_.resize(channel_->geometry().num_slots);
  has_sent_ = is_worn_ = is_retired_ = false;
}

void Path::lose(std::string reason) {
  channel_.reset();
  slots_.clear();
  num_in_flight_ = 0;
  forecast_ns_ = 0;
  num_quarantined_ = 0;
  is_leased_ = false;
  reason_ = std::move(reason);
}

std::optional<uint32_t> Path::free_slot(uint32_t window) const {
  if (is_retired_ || num_in_flight_ >= window) return std::nullopt;
  for (uint32_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].is_free()) return slot;
  }
  return std::nullopt;
}

void Path::put_in_flight(uint32_t slot, const Attempt& attempt) {
  ++num_in_flight_;
  forecast_ns_ += attempt.slice->forecast_ns;
  has_sent_ = true;
  slots_[slot].attempt = attempt;
}

void Path::release(uint32_t slot) {
  if (const Slice* slice = slots_[slot].attempt.slice) {
    --num_in_flight_;
    forecast_ns_ -= slice->forecast_ns;
  }
  if (slots_[slot].quarantine) --num_quarantined_;
  slots_[slot] = Slot{};
}

void Path::quarantine(uint32_t slot, bool is_superseded) {
  const Attempt& attempt = slots_[slot].attempt;
  const Slice& slice = *attempt.slice;
  const LayerPlan& plan = slice.call->layer->plan;
  const Quarantine kept{slice.call->id, plan.layer,     plan.shards[slice.shard_index].shard,
                        slice.index,    attempt.number, attempt.limit_ns,
                        is_superseded};
  release(slot);
  slots_[slot].quarantine = kept;
  ++num_quarantined_;
}

void Path::quarantine_all_of(const Call& call) {
  for (uint32_t slot = 0; slot < slots_.size(); ++slot) {
    const Slice* slice = slots_[slot].attempt.slice;
    if (slice != nullptr && slice->call == &call) quarantine(slot, false);
  }
}

void Path::supersede(const Slice& slice) {
  for (uint32_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].attempt.slice == &slice) quarantine(slot, true);
  }
}

int64_t Path::longest_limit_ns() const {
  int64_t longest = 0;
  for (const Slot& slot : slots_) {
    longest =
        std::max(longest, slot.quarantine ? slot.quarantine->limit_ns : slot.attempt.limit_ns);
  }
  return longest;
}

bool Path::has_in_flight(const Slice& slice) const {
  return std::any_of(slots_.begin(), slots_.end(),
                     [&slice](const Slot& slot) { return slot.attempt.slice == &slice; });
}

void Path::wear_out(std::string reason) {
  if (is_lost() || is_worn_) return;
  is_worn_ = true;
  reason_ = std::move(reason);
}

void Path::retire(std::string reason) {
  wear_out(std::move(reason));
  is_retired_ = true;
}

void Path::end_lease(const RingUse* used, bool has_failed) {
  is_leased_ = false;
  if (is_lost()) return;
  if (used != nullptr) {
    transport::ring_lender(channel_.get())->set_ring(used->head, used->tail);
    has_sent_ = true;
  }
  if (has_failed || used == nullptr) wear_out("a device step failed on it");
}

}  // namespace dflash::client
