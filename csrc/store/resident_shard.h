// One shard's experts, resident in a backend: loaded once, then read by whoever borrows them. The
// shard says what its source bytes add up to (compute/experts/content_checksum.h) as soon as
// somebody has read them all. Packing does so. Weights that stay in the mapped checkpoint wait for
// the store's background reader and are unchecked until then.
//
// An expert may also be mapped from a file of panels, which somebody wrote who had packed it. The
// file says what its source bytes add up to, and so does the shard from then on; the panels
// themselves are summed up before this process computes from them the first time, and again
// whenever the file has changed. Panels with another sum are damage as in memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/result.h"
#include "compute/experts/content_checksum.h"
#include "compute/experts/expert_backend.h"
#include "store/compute_turns.h"
#include "store/damage_reports.h"
#include "store/expert_slots.h"
#include "store/mapped_file.h"
#include "store/watched_files.h"

namespace dflash::store {

// Everything that decides a shard's numbers. The fingerprint names model, layer and experts, and
// what is made of them at load. Two shards for which all this is equal are the same.
struct ShardFacts {
  compute::FfnSpec spec;
  uint32_t num_local_experts = 0;
  compute::ResidentFormats formats;
  compute::NumericsClass numerics = compute::kDefaultNumerics;
  uint64_t weights_fingerprint = 0;

  bool operator==(const ShardFacts&) const = default;
};

// What is known of the source bytes of a shard.
struct ContentState {
  std::optional<uint64_t> checksum;  // empty while the shard is unchecked
  uint32_t num_read = 0;             // how many experts have been read whole
  std::optional<Error> failure;      // why the rest cannot be read
};

// Shared by the store, its borrowers and, for a step at a time, the background reader.
class ResidentShard {
 public:
  // How long a request waits for a damaged expert to be loaded again. Loading the largest experts
  // in use, 350 MB, takes a second from the page cache.
  static constexpr int64_t kReloadNs = 2'000'000'000;

  // What a shard has of the store that made it.
  struct OfStore {
    uint64_t number = 0;  // no other shard of the store has had it
    std::shared_ptr<DamageReports> reports = std::make_shared<DamageReports>();
    std::shared_ptr<ComputeTurns> turns = std::make_shared<ComputeTurns>();
    std::shared_ptr<ExpertSlots> slots = nullptr;
  };
  // `backend` outlives its layers here. `predicted_bytes` is what the shard holds once it is
  // loaded. The reports get every expert that is found damaged.
  ResidentShard(const ShardFacts& facts, std::shared_ptr<compute::ExpertBackend> backend,
                std::unique_ptr<compute::ExpertLayer> experts, uint64_t predicted_bytes,
                OfStore of_store);

  const ShardFacts& facts() const { return facts_; }
  uint64_t number() const { return number_; }
  // Whose turn it is to compute with this shard or another one of its store.
  ComputeTurns& turns() const { return *turns_; }
  // Whether it is lent more than once. Any thread.
  bool is_shared() const { return num_loans_.load(std::memory_order_acquire) > 1; }
  uint64_t predicted_bytes() const { return predicted_bytes_; }
  // Bytes of memory that hold weights; an estimate until all experts are loaded. Any thread.
  uint64_t resident_bytes() const;
  // Whether every expert is loaded. Any thread.
  bool is_complete() const;

  // Loads an expert; different experts may be loaded from different threads. Where the shard keeps
  // its sources, what `weights` refers to must outlive the shard (keep_file). Errors: those of
  // ExpertLayer.
  Status load_expert(uint32_t local_expert_id, const compute::ExpertWeights& weights,
                     compute::YieldingProgress& progress);
  // How experts lie in memory and in files of panels; empty where this shard takes none.
  std::optional<compute::PanelForm> panel_form() const { return experts_->panel_form(); }
  // Takes an expert's panels from `file`, where they begin at `offset`. An expert that is not there
  // yet is loaded by that; one that is changes over between two calls and gives its memory back.
  // The file says that its source bytes add up to `content_checksum` and its panels, biases
  // included, to `panels_sum` (base/checksum.h). Different experts may be mapped from different
  // threads. Errors: kCheckpoint where the file is too short; kInvalidArgument where a loaded
  // expert has other sums or is damaged; those of ExpertLayer::map_expert.
  Status map_expert(uint32_t local_expert_id, std::shared_ptr<const MappedFile> file,
                    uint64_t offset, uint64_t content_checksum, uint32_t panels_sum);
  // Says where an expert lies that is read into a slot whenever a call needs it and no slot has it.
  // Before any call. Errors: kUnsupported where the store has no slots; kInvalidArgument where
  // those hold fewer experts than this shard has; kCheckpoint where the file is too short.
  Status slot_expert(uint32_t local_expert_id, std::shared_ptr<const DirectFile> file,
                     uint64_t offset, uint64_t content_checksum, uint32_t panels_sum);
  // A packed expert for whoever writes it to a file, who alone may map it meanwhile. Empty pieces
  // where it is not loaded, damaged or not in memory.
  struct Packed {
    std::array<std::span<const std::byte>, 3> pieces;
    uint64_t content_checksum = 0;
    uint32_t panels_sum = 0;
  };
  Packed packed(uint32_t local_expert_id) const;
  // Whether experts are mapped whose panels nobody has summed up in this process. Any thread.
  bool has_unsummed() const;
  // Whether the weights of a loaded expert stay in the checkpoint, or are still to be read there.
  bool keeps_sources(uint32_t local_expert_id) const;
  // Keeps a file mapped as long as the shard lives. Any thread.
  void keep_file(std::shared_ptr<const MappedFile> file);
  // The same for a file that forward() reads. Called before experts are loaded from it. Errors:
  // kCheckpoint.
  Status compute_from(std::shared_ptr<const MappedFile> file);

  // Waits until no expert of the shard is damaged, at most kReloadNs. Any thread. Errors:
  // kWorkerFailed naming the expert.
  Status await_whole(compute::YieldingProgress& progress) const;
  // Computes a batch; any thread, one at a time: whoever computes takes a turn first. While experts
  // of the shard are damaged it waits for them to be loaded again, at most kReloadNs, so that
  // nothing is computed from weights that are known to have changed. Where files that it computes
  // from have changed since, each expert of a batch is read whole before it is used again, and must
  // be what it was. Errors: those of ExpertLayer; kWorkerFailed naming the expert where it was not
  // loaded again in time; kCheckpoint naming file and expert where its bytes are others now, cannot
  // be read, or were never read before. A file that is what it was again is computed from again.
  Status forward(const compute::ForwardArgs& args, compute::YieldingProgress& progress);

  // What is known of the source bytes so far. Any thread.
  ContentState content() const;

  // -- changes of weights in memory (scrubber.h) --
  // Sums up again what the shard computes from: the packed bytes, or with mapped weights the source
  // bytes in the page cache. Returns the bytes read, 0 where there is nothing in memory to sum up
  // or `stop` was set meanwhile; an expert whose sum is no longer that of its loading is damaged
  // from then on. Any thread; one at a time. Errors: those of ContentReader.
  Result<uint64_t> scrub_expert(uint32_t local_expert_id, const std::atomic<bool>& stop);
  bool is_damaged(uint32_t local_expert_id) const {
    return sources_[local_expert_id].is_damaged.load(std::memory_order_acquire);
  }
  // Sums up the packed bytes of experts [begin, end) again, and says whether each is what was
  // loaded; one that is not is damaged from then on. True where nothing is packed in memory, as
  // with mapped weights and those of a device. What is mapped from a file of panels is summed up
  // before its next use instead. Any thread; different ones may take different experts.
  bool are_packed_as_loaded(uint32_t begin, uint32_t end);
  // Loads a damaged expert from the same source. Any thread. Errors: those of load_expert();
  // kCheckpoint where the source is not what it was. The expert then stays damaged.
  Status reload_expert(uint32_t local_expert_id, const compute::ExpertWeights& weights,
                       compute::YieldingProgress& progress);
  // For tests: changes one bit of an expert's packed bytes, as bad memory would. Returns false
  // where there are none that can be written.
  bool flip_bit(uint32_t local_expert_id, size_t byte, uint32_t bit);

 private:
  friend class BackgroundReader;
  friend class ShardStore;

  enum class Source : uint8_t { kAbsent, kUnread, kRead };
  struct Expert {
    // Stored with release after the fields beside it were written, and acquired before they are
    // read.
    std::atomic<Source> source{Source::kAbsent};
    uint64_t checksum = 0;           // valid once the expert has been read
    compute::ExpertWeights weights;  // where the bytes of an unread expert lie
    uint32_t packed_sum = 0;         // of the packed bytes at load; fixed before any scrub
    // The panels lie in this file; null for others. Guarded by pieces_mutex_ once it is loaded.
    std::shared_ptr<const MappedFile> file;
    // Where its panels lie that slots hold for some of the time; no file for others.
    SlotSource slot_source;
    // Whether they must be summed up before they are used.
    std::atomic<bool> is_unsummed{false};
    // Set by whoever scrubs, cleared by whoever loads again, each with release.
    std::atomic<bool> is_damaged{false};
    // Of a file's bytes, guarded by compute_mutex_: whether they are those of the first reading, as
    // of which age of the files.
    uint32_t read_at_age = 0;
    bool is_other = false;
  };
  Error damage_error() const;
  void mark_damaged(uint32_t local_expert_id);
  std::array<std::span<const std::byte>, 3> pieces_of(uint32_t local_expert_id) const;
  bool is_panel_file(uint32_t local_expert_id) const;
  void distrust_panels();
  bool are_panels_whole(std::span<const uint16_t> local_expert_ids,
                        compute::YieldingProgress& progress);
  Error changed_error(uint32_t local_expert_id, const char* what) const;
  Status compare_with_files(std::span<const uint16_t> local_expert_ids,
                            compute::YieldingProgress& progress);
  Status compute(const compute::ForwardArgs& args, compute::YieldingProgress& progress);

  const ShardFacts facts_;
  const uint64_t predicted_bytes_;
  const std::shared_ptr<compute::ExpertBackend> backend_;
  const uint64_t number_;
  const std::shared_ptr<DamageReports> reports_;
  const std::shared_ptr<ComputeTurns> turns_;
  const std::shared_ptr<ExpertSlots> slots_;  // null where all experts stay in memory or are mapped
  uint64_t slots_owner_ = 0;
  std::mutex files_mutex_;
  std::vector<std::shared_ptr<const MappedFile>> files_;  // guarded; `experts_` may refer to them
  WatchedFiles watched_;                                  // those of them that forward() reads
  std::atomic<bool> computes_from_files_{false};
  const std::unique_ptr<compute::ExpertLayer> experts_;
  std::vector<Expert> sources_;  // [num_local_experts]
  std::atomic<uint32_t> num_loaded_{0};
  std::atomic<uint32_t> num_loans_{0};   // the store counts it
  std::atomic<int64_t> returned_ns_{0};  // when the last loan ended so far
  std::atomic<uint32_t> num_damaged_{0};
  std::atomic<uint32_t> num_distrusts_{0};  // how often panels lost what was known of them
  // Over one forward, loading a damaged expert again, and mapping one that is loaded.
  std::mutex compute_mutex_;
  // Over where the weights of loaded experts lie, for those who read them beside calls. It is taken
  // inside of compute_mutex_.
  mutable std::mutex pieces_mutex_;
  mutable std::mutex failure_mutex_;
  std::optional<Error> failure_;  // set by the background reader, which then leaves the shard alone
};

}  // namespace dflash::store
