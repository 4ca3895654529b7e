// Room in memory for some of the experts that lie in files of panels, for a worker whose memory is
// smaller than its experts. Each slot holds one expert of any layer. A call gets all of its experts
// into slots: those that are not there are read from the disk at once, in place of those that
// nobody has used for longest, while the call computes what has come. What a slot got is compared
// with the sum that its file has for it before a result that depends on it leaves.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "compute/cpu/page_buffer.h"
#include "compute/experts/expert_layer.h"
#include "store/direct_file.h"

namespace dflash::store {

// Where an expert lies on disk. The first part is what gate and up read; with biases, which lie at
// the end, it is all.
struct SlotSource {
  std::shared_ptr<const DirectFile> file;
  uint64_t offset = 0;
  uint64_t num_bytes = 0;  // of panels and biases
  uint64_t first_part_bytes = 0;
  uint32_t panels_sum = 0;
};

struct SlotStats {
  uint64_t hits = 0, misses = 0;  // experts of calls that were in a slot, and that were not
  uint64_t read_bytes = 0;
  uint32_t num_slots = 0;
  uint32_t num_readers = 0;
};

class ExpertSlots {
 public:
  // A disk that gives nothing for so long is gone.
  static constexpr int64_t kStandstillNs = 30'000'000'000;

  // `num_bytes` of memory, which is touched as it is used.
  explicit ExpertSlots(uint64_t num_bytes) : num_bytes_(num_bytes) {}
  // Ends the readers. Every Lease has ended.
  ~ExpertSlots();
  ExpertSlots(const ExpertSlots&) = delete;
  ExpertSlots& operator=(const ExpertSlots&) = delete;

  // Says that experts of so many bytes come, so many at a time. Before the first lease, or while
  // there is none: slots are made anew if theirs are too small. Errors: kInvalidArgument naming
  // both sizes where a layer's experts do not fit.
  Status expect(uint64_t expert_bytes, uint32_t most_experts);
  // A number that names a shard here, and no other one ever.
  uint64_t new_owner() { return next_owner_.fetch_add(1, std::memory_order_relaxed); }
  uint64_t touched_bytes() const;
  SlotStats stats() const;

  // The experts of one call that are in slots; others have come. There is one lease at a time:
  // begin() waits for the one before it to end, which is as long as one call. It is used by the
  // thread that made it and, as ExpertArrivals, by those that compute.
  class Lease final : public compute::ExpertArrivals {
   public:
    ~Lease() override;
    // The memory of an expert of the lease.
    const std::byte* memory(uint16_t local_expert_id) const;
    bool has_come(uint32_t local_expert_id, compute::ExpertPart part) const override;
    Status await(uint32_t local_expert_id, compute::ExpertPart part) override;
    // The experts of which the bytes that came were not what their file says, or did not come at
    // all; they are in no slot any more. All others have come. Waits for what is still on its way.
    // Errors: kCheckpoint where the disk gives nothing.
    Result<std::vector<uint16_t>> broken();

   private:
    friend class ExpertSlots;
    static constexpr uint32_t kNone = ~0u;
    Lease(ExpertSlots& slots, compute::YieldingProgress& progress)
        : slots_(slots), progress_(progress), held_(slots.lease_mutex_) {}
    void take(size_t index, uint32_t slot);
    uint32_t slot_of(uint32_t local_expert_id) const;

    ExpertSlots& slots_;
    compute::YieldingProgress& progress_;
    std::unique_lock<std::mutex> held_;
    std::vector<uint16_t> ids_;       // ascending
    std::vector<uint32_t> slots_of_;  // [ids_.size()]
  };
  // `sources` has the place on disk of each of `ids`, which ascend. Errors: kOutOfMemory;
  // kCheckpoint where slots are lost to a disk that gives nothing; kSystem without threads.
  Result<std::unique_ptr<Lease>> begin(uint64_t owner, std::span<const uint16_t> ids,
                                       std::span<const SlotSource* const> sources,
                                       compute::YieldingProgress& progress);

 private:
  enum Came : uint8_t { kFirst = 1, kSecond = 2, kAll = 3, kBroken = 4 };
  struct Slot {
    // Bits of Came, set with release by readers; the rest belongs to whoever has the lease.
    std::atomic<uint8_t> came{kAll};
    std::atomic<uint32_t> num_reading{0};  // parts that readers have, or that wait for one
    uint64_t owner = 0;                    // 0 for none
    uint16_t local_expert_id = 0;
    bool is_leased = false;
    uint32_t before = 0, after = 0;  // in the order of use
    SlotSource source;
  };
  // A part of an expert on its way. Parts of one expert are read in any order and by any threads.
  struct Read {
    uint32_t slot;
    uint64_t begin, end;  // bytes of the piece, whole blocks
    uint8_t gives;        // bits of Came
  };

  static uint64_t key_of(uint64_t owner, uint16_t id) { return owner << 16 | id; }
  std::byte* memory_of(uint32_t slot) const { return memory_.data() + slot * slot_bytes_; }
  Status make_slots();
  void activate_readers(uint32_t wanted);
  std::optional<uint32_t> place(uint64_t owner, uint16_t id, const SlotSource& source);
  template <typename IsDone>
  Status wait_until(const IsDone& is_done, const SlotSource& source,
                    compute::YieldingProgress& progress);
  std::optional<uint32_t> least_recent() const;
  void use(uint32_t slot);
  void unlink(uint32_t slot);
  void forget(uint32_t slot);
  void run_reader(uint32_t number);
  void read(const Read& read);
  void judge_readers(uint64_t num_bytes);

  const uint64_t num_bytes_;
  std::atomic<uint64_t> next_owner_{1};
  std::mutex lease_mutex_;  // held by a lease

  // Of whoever has the lease.
  uint64_t slot_bytes_ = 0;
  uint64_t expected_bytes_ = 0;  // of the largest expert
  uint32_t most_experts_ = 0;    // of a layer
  compute::PageBuffer memory_;
  std::unique_ptr<Slot[]>
      slots_;  // [num_slots_ + 1]; the last one begins and ends the order of use
  std::atomic<uint32_t> num_slots_{0};
  std::unordered_map<uint64_t, uint32_t> places_;  // slots by key_of()
  std::atomic<uint32_t> num_touched_{0};
  std::atomic<uint64_t> touched_slot_bytes_{0};
  std::atomic<uint64_t> hits_{0}, misses_{0}, read_bytes_{0};

  std::mutex reads_mutex_;
  std::condition_variable has_reads_, has_come_;
  std::deque<Read> reads_;            // guarded
  bool stopping_ = false;             // guarded
  uint32_t num_active_ = 0;           // guarded: readers with a lower number take reads
  uint64_t num_done_ = 0;             // guarded: reads that have ended
  std::vector<std::thread> readers_;  // guarded until stopping_ is set; some may have ended
  // How many readers gain is found once, by trying each number on reads that are asked for anyway.
  std::atomic<uint32_t> active_readers_{0};
  bool is_judged_ = false;     // guarded
  double best_speed_ = 0;      // guarded: of the number that was tried before, bytes per nanosecond
  uint64_t trial_bytes_ = 0;   // guarded
  int64_t trial_busy_ns_ = 0;  // guarded: while any reader had something to read
  int64_t busy_since_ns_ = 0;  // guarded: of those who read now
  uint32_t num_reading_ = 0;   // guarded
};

}  // namespace dflash::store
