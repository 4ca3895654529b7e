// The pace of a scrub, and its way through the shards by ascending fingerprint.
// SPDX-License-Identifier: Apache-2.0
#include "store/scrubber.h"

#include <algorithm>
#include <chrono>

#include "base/clock.h"

namespace dflash::store {
namespace {

// Where nothing is loaded yet, or nothing that lies in memory, the next look is after this time.
constexpr int64_t kEmptyNs = 1'000'000'000;
// A pause is at least so many times as long as the reading before it: 1 % of a core.
constexpr int64_t kIdleShare = 99;

}  // namespace

std::optional<Damage> Scrubber::run() {
  while (!stopping_.load(std::memory_order_relaxed)) {
    int64_t pause_ns = kEmptyNs;
    if (const auto shard = store_->at_or_after(fingerprint_); shard != nullptr) {
      if (shard->facts().weights_fingerprint != fingerprint_) next_expert_ = 0;
      fingerprint_ = shard->facts().weights_fingerprint;
      const uint32_t expert = next_expert_++;
      if (expert >= shard->facts().num_local_experts) {
        ++fingerprint_;  // wraps around to the lowest
        next_expert_ = 0;
        continue;
      }
      const int64_t begun_ns = thread_cpu_ns();
      auto read = shard->scrub_expert(expert, stopping_);
      const int64_t used_ns = thread_cpu_ns() - begun_ns;
      if (read.ok() && read.value() != 0) {
        scrubbed_bytes_.fetch_add(read.value(), std::memory_order_relaxed);
        if (shard->is_damaged(expert)) {
          damages_.fetch_add(1, std::memory_order_relaxed);
          return Damage{fingerprint_, expert};
        }
        const auto num_experts = static_cast<double>(std::max<uint64_t>(store_->num_experts(), 1));
        pause_ns =
            std::max(static_cast<int64_t>(period_s_ * 1e9 / num_experts), used_ns * kIdleShare);
      }
    }
    if (!pause(pause_ns)) break;
  }
  return std::nullopt;
}

bool Scrubber::pause(int64_t nanoseconds) {
  std::unique_lock lock(mutex_);
  return !changed_.wait_for(lock, std::chrono::nanoseconds(nanoseconds),
                            [this] { return stopping_.load(std::memory_order_relaxed); });
}

void Scrubber::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_.store(true, std::memory_order_relaxed);
  }
  changed_.notify_all();
}

ScrubStats Scrubber::stats() const {
  return {scrubbed_bytes_.load(std::memory_order_relaxed),
          damages_.load(std::memory_order_relaxed)};
}

}  // namespace dflash::store
