// The part of a shard whose panels lie in files: mapped, or read into slots as calls need them.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <utility>

#include "store/piece_sums.h"
#include "store/resident_shard.h"

namespace dflash::store {

// Whoever computes or sums up holds the lock meanwhile or takes it before and after, so that nobody
// takes memory that was given back for damage.
Status ResidentShard::map_expert(uint32_t local_expert_id, std::shared_ptr<const MappedFile> file,
                                 uint64_t offset, uint64_t content_checksum, uint32_t panels_sum) {
  const std::optional<compute::PanelForm> form = panel_form();
  if (!form || local_expert_id >= sources_.size())
    return Error{ErrorCode::kUnsupported, "this shard takes no panels from a file"};
  auto bytes = file->bytes(offset, form->num_bytes());
  if (!bytes.ok()) return std::move(bytes).error();
  DFLASH_TRY(compute_from(file));
  Expert& expert = sources_[local_expert_id];
  const bool is_new = expert.source.load(std::memory_order_relaxed) == Source::kAbsent;
  std::unique_lock<std::mutex> no_call(compute_mutex_, std::defer_lock);
  if (!is_new) {
    no_call.lock();
    if (is_damaged(local_expert_id) || expert.checksum != content_checksum ||
        expert.packed_sum != panels_sum) {
      return Error{ErrorCode::kInvalidArgument, file->path() + ": local expert " +
                                                    std::to_string(local_expert_id) +
                                                    " is not the one that is in memory"};
    }
  }
  {
    const std::lock_guard lock(pieces_mutex_);
    DFLASH_TRY(experts_->map_expert(local_expert_id, bytes.value(), content_checksum));
    expert.file = std::move(file);
  }
  expert.is_unsummed.store(true, std::memory_order_release);
  if (!is_new) return ok();
  expert.checksum = content_checksum;
  expert.packed_sum = panels_sum;
  expert.source.store(Source::kRead, std::memory_order_release);
  num_loaded_.fetch_add(1, std::memory_order_release);
  return ok();
}

Status ResidentShard::slot_expert(uint32_t local_expert_id, std::shared_ptr<const DirectFile> file,
                                  uint64_t offset, uint64_t content_checksum, uint32_t panels_sum) {
  const std::optional<compute::PanelForm> form = panel_form();
  if (!form || slots_ == nullptr || local_expert_id >= sources_.size())
    return Error{ErrorCode::kUnsupported, "this shard takes no panels into slots"};
  const uint64_t num_bytes = form->num_bytes();
  if (offset % DirectFile::kBlockBytes != 0 || offset > file->size_bytes() ||
      num_bytes > file->size_bytes() - offset) {
    return Error{ErrorCode::kCheckpoint, file->path() + ": an expert at byte " +
                                             std::to_string(offset) +
                                             " reaches beyond the end of the file"};
  }
  DFLASH_TRY(slots_->expect(num_bytes, facts_.num_local_experts));
  Expert& expert = sources_[local_expert_id];
  const bool is_new = expert.source.load(std::memory_order_relaxed) == Source::kAbsent;
  const uint64_t first = form->bias_bytes == 0 ? form->gate_up_bytes : num_bytes;
  expert.slot_source = {std::move(file), offset, num_bytes, first, panels_sum};
  expert.checksum = content_checksum;
  expert.packed_sum = panels_sum;
  expert.source.store(Source::kRead, std::memory_order_release);
  if (is_new) num_loaded_.fetch_add(1, std::memory_order_release);
  return ok();
}

ResidentShard::Packed ResidentShard::packed(uint32_t local_expert_id) const {
  const Expert& expert = sources_[local_expert_id];
  if (expert.source.load(std::memory_order_acquire) != Source::kRead || is_damaged(local_expert_id))
    return {};
  return {pieces_of(local_expert_id), expert.checksum, expert.packed_sum};
}

bool ResidentShard::has_unsummed() const {
  return std::any_of(sources_.begin(), sources_.end(), [](const Expert& expert) {
    return expert.is_unsummed.load(std::memory_order_acquire);
  });
}

// Memory of a slot is another expert's at any time, and was compared when it was filled.
Pieces ResidentShard::pieces_of(uint32_t local_expert_id) const {
  const std::lock_guard lock(pieces_mutex_);
  if (sources_[local_expert_id].slot_source.file != nullptr) return {};
  return experts_->resident_pieces(local_expert_id);
}

bool ResidentShard::is_panel_file(uint32_t local_expert_id) const {
  const std::lock_guard lock(pieces_mutex_);
  return sources_[local_expert_id].file != nullptr;
}

// A file of panels is never written again, but somebody may do so all the same, or cut it off.
void ResidentShard::distrust_panels() {
  num_distrusts_.fetch_add(1, std::memory_order_release);
  for (uint32_t id = 0; id < sources_.size(); ++id) {
    if (is_panel_file(id)) sources_[id].is_unsummed.store(true, std::memory_order_release);
  }
}

// The caller holds compute_mutex_. What is not in memory yet is asked for at once, so that a disk
// reads it in one go.
bool ResidentShard::are_panels_whole(std::span<const uint16_t> local_expert_ids,
                                     compute::YieldingProgress& progress) {
  const auto is_unsummed = [this](uint16_t id) {
    return sources_[id].is_unsummed.load(std::memory_order_acquire);
  };
  if (std::none_of(local_expert_ids.begin(), local_expert_ids.end(), is_unsummed)) return true;
  for (const uint16_t id : local_expert_ids) {
    if (!is_unsummed(id)) continue;
    const std::lock_guard lock(pieces_mutex_);
    if (sources_[id].file != nullptr)
      sources_[id].file->will_need(experts_->resident_pieces(id)[0]);
  }
  bool are_whole = true;
  for (const uint16_t id : local_expert_ids) {
    if (!is_unsummed(id)) continue;
    const std::optional<uint32_t> sum = sum_of(pieces_of(id), nullptr, &progress);
    if (*sum == sources_[id].packed_sum) {
      sources_[id].is_unsummed.store(false, std::memory_order_release);
    } else {
      mark_damaged(id);
      are_whole = false;
    }
  }
  return are_whole;
}

// Computes a batch once. Of the experts in slots, those whose bytes were wrong are damaged
// afterwards, and what was computed is not to be used.
Status ResidentShard::compute(const compute::ForwardArgs& args,
                              compute::YieldingProgress& progress) {
  if (slots_ == nullptr) return experts_->forward(args, progress);
  std::vector<uint16_t> ids(args.local_expert_ids.begin(), args.local_expert_ids.end());
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  // One that was damaged has been packed again, into memory of its own.
  std::erase_if(ids, [this](uint16_t id) { return sources_[id].slot_source.file == nullptr; });
  std::vector<const SlotSource*> places;
  for (const uint16_t id : ids) places.push_back(&sources_[id].slot_source);
  auto lease = slots_->begin(slots_owner_, ids, places, progress);
  if (!lease.ok()) return std::move(lease).error();
  for (const uint16_t id : ids) {
    const Expert& expert = sources_[id];
    const std::lock_guard lock(pieces_mutex_);
    DFLASH_TRY(experts_->map_expert(id, {lease.value()->memory(id), expert.slot_source.num_bytes},
                                    expert.checksum));
  }
  compute::ForwardArgs with_arrivals = args;
  with_arrivals.arrivals = lease.value().get();
  Status computed = experts_->forward(with_arrivals, progress);
  auto broken = lease.value()->broken();
  if (!broken.ok()) return std::move(broken).error();
  for (const uint16_t id : broken.value()) mark_damaged(id);
  return computed;
}

}  // namespace dflash::store
