// Slots in the order of use, and the threads that read into them.
// SPDX-License-Identifier: Apache-2.0
#include "store/expert_slots.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <string>
#include <system_error>
#include <utility>

#include "base/checksum.h"
#include "base/clock.h"

namespace dflash::store {
namespace {

using compute::ExpertPart;

// The numbers of readers that are tried, and what is read in each trial: a second at least of what
// disks of today give.
constexpr uint32_t kReaders[] = {4, 8, 16};
constexpr uint64_t kTrialBytes = uint64_t{512} << 20;
// A larger number of readers is kept only for so much more speed.
constexpr double kGain = 1.05;
// The time between two looks of a thread that waits for the disk at whether anything came.
constexpr int64_t kLookMs = 20;

uint64_t in_blocks(uint64_t num_bytes) {
  return (num_bytes + DirectFile::kBlockBytes - 1) / DirectFile::kBlockBytes *
         DirectFile::kBlockBytes;
}

}  // namespace

ExpertSlots::~ExpertSlots() {
  {
    const std::lock_guard lock(reads_mutex_);
    stopping_ = true;
    reads_.clear();
  }
  has_reads_.notify_all();
  for (std::thread& reader : readers_) reader.join();
}

Status ExpertSlots::expect(uint64_t expert_bytes, uint32_t most_experts) {
  const std::lock_guard lock(lease_mutex_);
  const uint64_t largest = std::max(expected_bytes_, in_blocks(expert_bytes));
  const uint32_t most = std::max(most_experts_, most_experts);
  if (num_bytes_ / largest < most) {
    return Error{ErrorCode::kInvalidArgument,
                 "memory: " + std::to_string(num_bytes_) + " bytes are room for " +
                     std::to_string(num_bytes_ / largest) + " experts, and a call may need the " +
                     std::to_string(most) + " of a layer; raise `memory` to " +
                     std::to_string(most * largest) + " bytes at least, or spread the layer"};
  }
  expected_bytes_ = largest;
  most_experts_ = most;
  if (slots_ == nullptr || slot_bytes_ >= largest) return ok();
  for (uint32_t slot = 0; slot < num_slots_.load(); ++slot) {
    if (slots_[slot].num_reading.load(std::memory_order_acquire) != 0)
      return Error{ErrorCode::kInvalidArgument, "a shard is loaded while calls of others read"};
  }
  num_slots_.store(0);
  num_touched_.store(0);
  places_.clear();
  slots_.reset();
  memory_ = compute::PageBuffer();
  return ok();
}

// Readers come before slots: whoever finds slots finds somebody who fills them.
Status ExpertSlots::make_slots() {
  if (slots_ != nullptr) return ok();
  {
    const std::lock_guard lock(reads_mutex_);
    if (num_active_ == 0) activate_readers(kReaders[0]);
    if (readers_.empty())
      return Error{ErrorCode::kSystem, "cannot start a thread that reads experts"};
  }
  slot_bytes_ = expected_bytes_;
  const auto num_slots = static_cast<uint32_t>(
      std::min<uint64_t>(num_bytes_ / slot_bytes_, std::numeric_limits<uint32_t>::max() - 1));
  auto memory = compute::PageBuffer::create(num_slots * slot_bytes_);
  if (!memory.ok()) return std::move(memory).error();
  memory_ = std::move(memory).value();
  slots_ = std::make_unique<Slot[]>(num_slots + 1);
  for (uint32_t slot = 0; slot <= num_slots; ++slot) {
    slots_[slot].before = slot == 0 ? num_slots : slot - 1;
    slots_[slot].after = slot == num_slots ? 0 : slot + 1;
  }
  num_slots_.store(num_slots);
  return ok();
}

uint64_t ExpertSlots::touched_bytes() const {
  return num_touched_.load(std::memory_order_relaxed) * touched_slot_bytes_.load();
}

SlotStats ExpertSlots::stats() const {
  return {hits_.load(std::memory_order_relaxed), misses_.load(std::memory_order_relaxed),
          read_bytes_.load(std::memory_order_relaxed), num_slots_.load(),
          active_readers_.load(std::memory_order_relaxed)};
}

// -- the order of use: a ring through the slots, least recently used first, that begins and ends
// -- with an entry that is no slot

void ExpertSlots::unlink(uint32_t slot) {
  slots_[slots_[slot].before].after = slots_[slot].after;
  slots_[slots_[slot].after].before = slots_[slot].before;
}

void ExpertSlots::use(uint32_t slot) {
  const uint32_t end = num_slots_.load(std::memory_order_relaxed);
  unlink(slot);
  slots_[slot].before = slots_[end].before;
  slots_[slot].after = end;
  slots_[slots_[end].before].after = slot;
  slots_[end].before = slot;
}

std::optional<uint32_t> ExpertSlots::least_recent() const {
  const uint32_t end = num_slots_.load(std::memory_order_relaxed);
  for (uint32_t slot = slots_[end].after; slot != end; slot = slots_[slot].after) {
    if (!slots_[slot].is_leased && slots_[slot].num_reading.load(std::memory_order_acquire) == 0)
      return slot;
  }
  return std::nullopt;
}

// -- leases

Result<std::unique_ptr<ExpertSlots::Lease>> ExpertSlots::begin(
    uint64_t owner, std::span<const uint16_t> ids, std::span<const SlotSource* const> sources,
    compute::YieldingProgress& progress) {
  std::unique_ptr<Lease> lease(new Lease(*this, progress));
  DFLASH_TRY(make_slots());
  std::vector<size_t> missing;
  lease->ids_.assign(ids.begin(), ids.end());
  lease->slots_of_.assign(ids.size(), Lease::kNone);
  // What is there comes first, so that it does not make room for what is not.
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto found = places_.find(key_of(owner, ids[i]));
    if (found != places_.end() &&
        (slots_[found->second].came.load(std::memory_order_acquire) & kBroken) == 0)
      lease->take(i, found->second);
    else
      missing.push_back(i);
  }
  hits_.fetch_add(ids.size() - missing.size(), std::memory_order_relaxed);
  misses_.fetch_add(missing.size(), std::memory_order_relaxed);
  for (const size_t i : missing) {
    const auto slot = place(owner, ids[i], *sources[i]);
    if (!slot) {
      // Nobody reads into those that were given out above.
      for (const size_t given : missing)
        if (lease->slots_of_[given] != Lease::kNone) forget(lease->slots_of_[given]);
      return Error{ErrorCode::kCheckpoint,
                   sources[i]->file->path() + ": the disk does not end reads that it began"};
    }
    lease->take(i, *slot);
  }
  std::vector<Read> first, second;
  for (const size_t i : missing) {
    const uint32_t slot = lease->slots_of_[i];
    const uint64_t end = in_blocks(sources[i]->num_bytes);
    const uint64_t middle = std::min(in_blocks(sources[i]->first_part_bytes), end);
    const bool is_whole = middle == end;
    slots_[slot].came.store(0, std::memory_order_release);
    slots_[slot].num_reading.store(is_whole ? 1 : 2, std::memory_order_release);
    first.push_back({slot, 0, middle, is_whole ? kAll : kFirst});
    if (!is_whole) second.push_back({slot, middle, end, kSecond});
  }
  if (missing.empty()) return lease;
  {
    const std::lock_guard lock(reads_mutex_);
    reads_.insert(reads_.end(), first.begin(), first.end());
    reads_.insert(reads_.end(), second.begin(), second.end());
  }
  has_reads_.notify_all();
  return lease;
}

// Returns the slot that an expert gets, nothing where none is free.
std::optional<uint32_t> ExpertSlots::place(uint64_t owner, uint16_t id, const SlotSource& source) {
  if (const auto broken = places_.find(key_of(owner, id)); broken != places_.end())
    forget(broken->second);
  const auto slot = least_recent();
  if (!slot) return std::nullopt;
  forget(*slot);
  Slot& chosen = slots_[*slot];
  if (chosen.source.file == nullptr) {
    touched_slot_bytes_.store(slot_bytes_, std::memory_order_relaxed);
    num_touched_.fetch_add(1, std::memory_order_relaxed);
  }
  chosen.owner = owner;
  chosen.local_expert_id = id;
  chosen.source = source;
  places_[key_of(owner, id)] = *slot;
  return slot;
}

// The expert that a slot had is in no slot any more.
void ExpertSlots::forget(uint32_t slot) {
  Slot& chosen = slots_[slot];
  if (chosen.owner != 0) places_.erase(key_of(chosen.owner, chosen.local_expert_id));
  chosen.owner = 0;
}

void ExpertSlots::Lease::take(size_t index, uint32_t slot) {
  slots_of_[index] = slot;
  slots_.slots_[slot].is_leased = true;
  slots_.use(slot);
}

// A slot that is still being read into is free for others once that has ended.
ExpertSlots::Lease::~Lease() {
  for (const uint32_t slot : slots_of_)
    if (slot != kNone) slots_.slots_[slot].is_leased = false;
}

uint32_t ExpertSlots::Lease::slot_of(uint32_t local_expert_id) const {
  const auto found = std::lower_bound(ids_.begin(), ids_.end(), local_expert_id);
  if (found == ids_.end() || *found != local_expert_id) return kNone;
  return slots_of_[static_cast<size_t>(found - ids_.begin())];
}

const std::byte* ExpertSlots::Lease::memory(uint16_t local_expert_id) const {
  return slots_.memory_of(slot_of(local_expert_id));
}

bool ExpertSlots::Lease::has_come(uint32_t local_expert_id, ExpertPart part) const {
  const uint32_t slot = slot_of(local_expert_id);
  if (slot == kNone) return true;
  const uint8_t came = slots_.slots_[slot].came.load(std::memory_order_acquire);
  return (came & (part == ExpertPart::kGateUp ? kFirst : kSecond)) != 0;
}

Status ExpertSlots::Lease::await(uint32_t local_expert_id, ExpertPart part) {
  if (has_come(local_expert_id, part)) return ok();
  return slots_.wait_until([&] { return has_come(local_expert_id, part); },
                           slots_.slots_[slot_of(local_expert_id)].source, progress_);
}

Result<std::vector<uint16_t>> ExpertSlots::Lease::broken() {
  std::vector<uint16_t> found;
  for (size_t i = 0; i < ids_.size(); ++i) {
    Slot& slot = slots_.slots_[slots_of_[i]];
    const auto is_idle = [&] { return slot.num_reading.load(std::memory_order_acquire) == 0; };
    if (!is_idle()) DFLASH_TRY(slots_.wait_until(is_idle, slot.source, progress_));
    if ((slot.came.load(std::memory_order_acquire) & kBroken) == 0) continue;
    found.push_back(ids_[i]);
    slots_.forget(slots_of_[i]);
    slot.came.store(kAll, std::memory_order_release);
  }
  return found;
}

template <typename IsDone>
Status ExpertSlots::wait_until(const IsDone& is_done, const SlotSource& source,
                               compute::YieldingProgress& progress) {
  std::unique_lock lock(reads_mutex_);
  uint64_t seen = num_done_;
  Deadline until = Deadline::after_ns(kStandstillNs);
  while (!is_done()) {
    has_come_.wait_for(lock, std::chrono::milliseconds(kLookMs),
                       [&] { return num_done_ != seen || is_done(); });
    const uint64_t done = num_done_ - seen;
    seen += done;
    if (done != 0) until = Deadline::after_ns(kStandstillNs);
    if (until.has_passed()) {
      return Error{ErrorCode::kCheckpoint,
                   source.file->path() + ": the disk has given nothing for " +
                       std::to_string(kStandstillNs / 1'000'000'000) + " s"};
    }
    // The lock goes meanwhile, because the thread of a data path moves its bytes here.
    lock.unlock();
    progress.count_and_yield(done);
    lock.lock();
  }
  return ok();
}

// -- readers

void ExpertSlots::run_reader(uint32_t number) {
  std::unique_lock lock(reads_mutex_);
  for (;;) {
    // This wait is for orders of this process itself, and the destructor ends it.
    has_reads_.wait(lock, [&] { return stopping_ || number >= num_active_ || !reads_.empty(); });
    if (stopping_ || number >= num_active_) return;
    const Read next = reads_.front();
    reads_.pop_front();
    if (num_reading_++ == 0) busy_since_ns_ = now_ns();
    lock.unlock();
    read(next);
    lock.lock();
    ++num_done_;
    if (--num_reading_ == 0) trial_busy_ns_ += now_ns() - busy_since_ns_;
    judge_readers(next.end - next.begin);
    has_come_.notify_all();
  }
}

// What could not be read counts as other bytes than the file had: its expert is packed again.
void ExpertSlots::read(const Read& read) {
  Slot& slot = slots_[read.slot];
  const SlotSource& source = slot.source;
  std::byte* memory = memory_of(read.slot);
  const Status done =
      source.file->read(source.offset + read.begin, read.end - read.begin, memory + read.begin);
  read_bytes_.fetch_add(read.end - read.begin, std::memory_order_relaxed);
  uint8_t came = done.ok() ? read.gives : static_cast<uint8_t>(kAll | kBroken);
  came |= slot.came.fetch_or(came, std::memory_order_acq_rel);
  // Whoever brings the last part sums up. Computing has begun meanwhile; its result waits.
  if (came == kAll && checksum({memory, source.num_bytes}) != source.panels_sum)
    slot.came.fetch_or(kBroken, std::memory_order_acq_rel);
  slot.num_reading.fetch_sub(1, std::memory_order_release);
}

// The caller holds reads_mutex_. A number of readers has been tried once it has read enough; the
// next larger one is tried as long as that gains.
void ExpertSlots::judge_readers(uint64_t num_bytes) {
  if (is_judged_) return;
  trial_bytes_ += num_bytes;
  if (trial_bytes_ < kTrialBytes || trial_busy_ns_ == 0) return;
  const double speed = static_cast<double>(trial_bytes_) / static_cast<double>(trial_busy_ns_);
  trial_bytes_ = 0;
  trial_busy_ns_ = 0;
  const bool is_gain = speed > kGain * best_speed_;
  const auto* tried = std::find(std::begin(kReaders), std::end(kReaders), num_active_);
  is_judged_ = !is_gain || tried + 1 == std::end(kReaders);
  best_speed_ = speed;
  if (!is_judged_)
    activate_readers(tried[1]);
  else if (!is_gain && tried != std::begin(kReaders))
    activate_readers(tried[-1]);
}

// The caller holds reads_mutex_. Those that are one too many end; there is no thread that is woken
// by each call and has nothing to do. Where the system gives fewer threads, these do.
void ExpertSlots::activate_readers(uint32_t wanted) {
  if (stopping_) return;
  num_active_ = wanted;
  try {
    while (readers_.size() < wanted)
      readers_.emplace_back(
          [this, number = static_cast<uint32_t>(readers_.size())] { run_reader(number); });
  } catch (const std::system_error&) {
    is_judged_ = true;
  }
  active_readers_.store(std::min(wanted, static_cast<uint32_t>(readers_.size())),
                        std::memory_order_relaxed);
  has_reads_.notify_all();
}

}  // namespace dflash::store
