// A shard's loading and what is known of its contents, by one atomic per expert.
// SPDX-License-Identifier: Apache-2.0
#include "store/resident_shard.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/clock.h"
#include "store/piece_sums.h"

namespace dflash::store {
namespace {

// The time between two looks at whether a damaged expert was loaded again.
constexpr int64_t kReloadNapNs = 1'000'000;

// Reads an expert's source bytes whole; nothing where `stop` was set meanwhile.
Result<std::optional<uint64_t>> read_content(const compute::ExpertWeights& weights,
                                             const std::atomic<bool>* stop,
                                             compute::YieldingProgress* progress = nullptr) {
  compute::ContentReader reader(weights);
  for (;;) {
    if (stop != nullptr && stop->load(std::memory_order_relaxed)) return std::optional<uint64_t>();
    if (progress != nullptr) progress->count_and_yield();
    auto step = reader.read(kScrubStepBytes);
    if (!step.ok()) return std::move(step).error();
    if (step.value()) return std::optional<uint64_t>(reader.value());
  }
}

uint64_t source_bytes(const compute::ExpertWeights& weights) {
  uint64_t bytes = 0;
  for (const compute::MatrixView* matrix : {&weights.gate, &weights.up, &weights.down})
    bytes += matrix->data == nullptr
                 ? 0
                 : compute::row_bytes(matrix->format, matrix->inputs) * matrix->outputs;
  return bytes;
}

}  // namespace

ResidentShard::ResidentShard(const ShardFacts& facts,
                             std::shared_ptr<compute::ExpertBackend> backend,
                             std::unique_ptr<compute::ExpertLayer> experts,
                             uint64_t predicted_bytes, OfStore of_store)
    : facts_(facts),
      predicted_bytes_(predicted_bytes),
      backend_(std::move(backend)),
      number_(of_store.number),
      reports_(std::move(of_store.reports)),
      turns_(std::move(of_store.turns)),
      slots_(std::move(of_store.slots)),
      slots_owner_(slots_ == nullptr ? 0 : slots_->new_owner()),
      experts_(std::move(experts)),
      sources_(facts.num_local_experts) {}

bool ResidentShard::is_complete() const {
  return num_loaded_.load(std::memory_order_acquire) == facts_.num_local_experts;
}

// The layer is asked only when nobody loads into it any more.
uint64_t ResidentShard::resident_bytes() const {
  if (is_complete()) {
    const std::lock_guard lock(pieces_mutex_);
    return experts_->resident_bytes();
  }
  const uint64_t num_loaded = num_loaded_.load(std::memory_order_relaxed);
  return predicted_bytes_ / facts_.num_local_experts * num_loaded;
}

Status ResidentShard::load_expert(uint32_t local_expert_id, const compute::ExpertWeights& weights,
                                  compute::YieldingProgress& progress) {
  DFLASH_TRY(experts_->load_expert(local_expert_id, weights, progress));
  Expert& expert = sources_[local_expert_id];
  const bool is_new = expert.source.load(std::memory_order_relaxed) == Source::kAbsent;
  const std::optional<uint64_t> checksum = experts_->content_checksum(local_expert_id);
  if (checksum) {
    expert.checksum = *checksum;
  } else {
    expert.weights = weights;
  }
  const Pieces pieces = experts_->resident_pieces(local_expert_id);
  if (total_bytes(pieces) != 0) expert.packed_sum = *sum_of(pieces, nullptr);
  expert.source.store(checksum ? Source::kRead : Source::kUnread, std::memory_order_release);
  if (is_new) num_loaded_.fetch_add(1, std::memory_order_release);
  return ok();
}

bool ResidentShard::keeps_sources(uint32_t local_expert_id) const {
  return local_expert_id < sources_.size() &&
         sources_[local_expert_id].source.load(std::memory_order_acquire) == Source::kUnread;
}

void ResidentShard::keep_file(std::shared_ptr<const MappedFile> file) {
  const std::lock_guard lock(files_mutex_);
  if (std::find(files_.begin(), files_.end(), file) == files_.end())
    files_.push_back(std::move(file));
}

Status ResidentShard::compute_from(std::shared_ptr<const MappedFile> file) {
  keep_file(file);
  if (!file->can_change()) return ok();
  DFLASH_TRY(watched_.add(std::move(file)));
  computes_from_files_.store(true, std::memory_order_release);
  return ok();
}

ContentState ResidentShard::content() const {
  ContentState state;
  std::vector<uint64_t> values;
  values.reserve(sources_.size());
  for (const Expert& expert : sources_) {
    if (expert.source.load(std::memory_order_acquire) == Source::kRead)
      values.push_back(expert.checksum);
  }
  state.num_read = static_cast<uint32_t>(values.size());
  if (values.size() == sources_.size()) state.checksum = compute::shard_checksum(values);
  const std::lock_guard lock(failure_mutex_);
  state.failure = failure_;
  return state;
}

Error ResidentShard::damage_error() const {
  uint32_t id = 0;
  while (id + 1 < sources_.size() && !is_damaged(id)) ++id;
  return Error{ErrorCode::kWorkerFailed,
               "the weights of local expert " + std::to_string(id) +
                   " have changed in memory and were not loaded again within " +
                   std::to_string(kReloadNs / 1'000'000) + " ms; nothing is computed from them"};
}

// The count goes on while this waits, because nothing here is stuck.
Status ResidentShard::await_whole(compute::YieldingProgress& progress) const {
  const Deadline until = Deadline::after_ns(kReloadNs);
  while (num_damaged_.load(std::memory_order_acquire) != 0) {
    if (until.has_passed()) return damage_error();
    nap_ns(kReloadNapNs);
    progress.count_and_yield();
  }
  return ok();
}

Error ResidentShard::changed_error(uint32_t local_expert_id, const char* what) const {
  return Error{ErrorCode::kCheckpoint, watched_.changed_path() + ": local expert " +
                                           std::to_string(local_expert_id) + " " + what};
}

// The files have changed at some time. What is known of an expert holds as long as they do not
// change again, which forward() sees after it has computed.
Status ResidentShard::compare_with_files(std::span<const uint16_t> local_expert_ids,
                                         compute::YieldingProgress& progress) {
  if (!watched_.are_as_seen()) {
    DFLASH_TRY(watched_.look_again());
    distrust_panels();
  }
  for (const uint16_t id : local_expert_ids) {
    Expert& expert = sources_[id];
    if (expert.weights.up.data == nullptr) continue;  // it is packed, in memory or in a file
    if (expert.source.load(std::memory_order_acquire) != Source::kRead) {
      return changed_error(id,
                           "was changed, or its file's times were, before all of it had been read; "
                           "nothing is computed from it before this worker is started again");
    }
    if (expert.read_at_age != watched_.age()) {
      auto read = read_content(expert.weights, nullptr, &progress);
      if (!read.ok()) return std::move(read).error();
      expert.is_other = *read.value() != expert.checksum;
      expert.read_at_age = watched_.age();
    }
    if (expert.is_other) {
      return changed_error(id,
                           "is not what was loaded: the file was changed under use, or cannot be "
                           "read; nothing is computed from it before it has its bytes again");
    }
  }
  return ok();
}

// A change that is found while a batch is computed counts for that batch: it is computed again.
Status ResidentShard::forward(const compute::ForwardArgs& args,
                              compute::YieldingProgress& progress) {
  // Bounds the time of a call on memory that changes all the while. A file of panels that is
  // damaged costs three tries: it changed, its experts are found damaged, and setting it aside
  // changes its times. A shard has several such files, and one after the other may be found in the
  // same call.
  constexpr int kTries = 12;
  bool is_file_changing = false;
  for (int tries = 0; tries < kTries; ++tries) {
    DFLASH_TRY(await_whole(progress));
    const std::lock_guard lock(compute_mutex_);
    if (num_damaged_.load(std::memory_order_acquire) != 0) continue;
    if (watched_.age() != 0) DFLASH_TRY(compare_with_files(args.local_expert_ids, progress));
    if (!are_panels_whole(args.local_expert_ids, progress)) continue;
    const bool has_files = computes_from_files_.load(std::memory_order_acquire);
    Status computed = compute(args, progress);
    if (num_damaged_.load(std::memory_order_acquire) != 0) continue;
    if (has_files && !watched_.are_as_seen()) {
      is_file_changing = true;
      DFLASH_TRY(watched_.look_again());
      distrust_panels();
      continue;
    }
    DFLASH_TRY(std::move(computed));
    if (num_damaged_.load(std::memory_order_acquire) == 0) return ok();
  }
  if (is_file_changing && num_damaged_.load(std::memory_order_acquire) == 0)
    return changed_error(args.local_expert_ids[0], "is in a file that changes all the while");
  return damage_error();
}

Result<uint64_t> ResidentShard::scrub_expert(uint32_t local_expert_id,
                                             const std::atomic<bool>& stop) {
  Expert& expert = sources_[local_expert_id];
  if (expert.source.load(std::memory_order_acquire) != Source::kRead || is_damaged(local_expert_id))
    return uint64_t{0};
  bool is_whole = true;
  const uint32_t num_distrusts = num_distrusts_.load(std::memory_order_acquire);
  const Pieces pieces = pieces_of(local_expert_id);
  uint64_t num_bytes = total_bytes(pieces);
  if (num_bytes != 0) {
    const std::optional<uint32_t> sum = sum_of(pieces, &stop);
    // Memory that was given back meanwhile for panels in a file says nothing about the expert.
    if (!sum || pieces_of(local_expert_id)[0].data() != pieces[0].data()) return uint64_t{0};
    is_whole = *sum == expert.packed_sum;
    if (is_whole && expert.is_unsummed.load(std::memory_order_acquire)) {
      // A file that is still as it was seen had these bytes while they were read.
      const std::lock_guard lock(compute_mutex_);
      if (num_distrusts == num_distrusts_.load(std::memory_order_acquire) && watched_.are_as_seen())
        expert.is_unsummed.store(false, std::memory_order_release);
    }
  } else if (expert.weights.up.data != nullptr) {
    auto read = read_content(expert.weights, &stop);
    if (!read.ok()) return std::move(read).error();
    if (!read.value()) return uint64_t{0};
    is_whole = *read.value() == expert.checksum;
    num_bytes = source_bytes(expert.weights);
  }
  if (!is_whole) mark_damaged(local_expert_id);
  return num_bytes;
}

void ResidentShard::mark_damaged(uint32_t local_expert_id) {
  if (sources_[local_expert_id].is_damaged.exchange(true, std::memory_order_acq_rel)) return;
  num_damaged_.fetch_add(1, std::memory_order_release);
  reports_->add({number_, local_expert_id});
}

bool ResidentShard::are_packed_as_loaded(uint32_t begin, uint32_t end) {
  bool are_whole = true;
  for (uint32_t id = begin; id < end && id < sources_.size(); ++id) {
    Expert& expert = sources_[id];
    if (expert.source.load(std::memory_order_acquire) == Source::kAbsent) continue;
    if (is_panel_file(id)) {
      expert.is_unsummed.store(true, std::memory_order_release);
      continue;
    }
    const Pieces pieces = pieces_of(id);
    if (total_bytes(pieces) != 0 && *sum_of(pieces, nullptr) != expert.packed_sum) mark_damaged(id);
    are_whole = are_whole && !is_damaged(id);
  }
  return are_whole;
}

Status ResidentShard::reload_expert(uint32_t local_expert_id, const compute::ExpertWeights& weights,
                                    compute::YieldingProgress& progress) {
  if (local_expert_id >= sources_.size() || !is_damaged(local_expert_id)) {
    return Error{ErrorCode::kInvalidArgument,
                 "local expert " + std::to_string(local_expert_id) + " is not damaged"};
  }
  const std::lock_guard lock(compute_mutex_);
  Expert& expert = sources_[local_expert_id];
  {
    // It is packed into memory of its own, wherever its panels lay before.
    const std::lock_guard pieces_lock(pieces_mutex_);
    DFLASH_TRY(experts_->load_expert(local_expert_id, weights, progress));
    expert.file = nullptr;
    expert.slot_source.file = nullptr;
  }
  expert.is_unsummed.store(false, std::memory_order_release);
  std::optional<uint64_t> content = experts_->content_checksum(local_expert_id);
  if (!content) {
    auto read = read_content(weights, nullptr);
    if (!read.ok()) return std::move(read).error();
    content = read.value();
    expert.weights = weights;
  }
  const Pieces pieces = experts_->resident_pieces(local_expert_id);
  const bool is_same = total_bytes(pieces) == 0 || *sum_of(pieces, nullptr) == expert.packed_sum;
  if (*content != expert.checksum || !is_same) {
    return Error{ErrorCode::kCheckpoint,
                 "local expert " + std::to_string(local_expert_id) +
                     " was loaded again, and its bytes are not those of the first loading"};
  }
  if (expert.is_damaged.exchange(false, std::memory_order_acq_rel))
    num_damaged_.fetch_sub(1, std::memory_order_release);
  return ok();
}

bool ResidentShard::flip_bit(uint32_t local_expert_id, size_t byte, uint32_t bit) {
  if (local_expert_id >= sources_.size()) return false;
  const std::lock_guard lock(compute_mutex_);
  const std::span<const std::byte> panels = experts_->resident_pieces(local_expert_id)[0];
  if (byte >= panels.size() || is_panel_file(local_expert_id)) return false;
  const_cast<std::byte&>(panels[byte]) ^= static_cast<std::byte>(1u << (bit % 8));
  return true;
}

}  // namespace dflash::store
