// The pace of a scrub, and its way through the shards by ascending number.
// SPDX-License-Identifier: Apache-2.0
#include "store/scrubber.h"

#include <algorithm>

#include "base/clock.h"

namespace dflash::store {
namespace {

// Where nothing is loaded yet, or nothing that lies in memory, the next look is after this time.
constexpr int64_t kEmptyNs = 1'000'000'000;
// A pause is at least so many times as long as the reading before it: 1 % of a core.
constexpr int64_t kIdleShare = 99;

}  // namespace

std::optional<Damage> Scrubber::run() {
  const auto is_stopping = [this] { return stopping_.load(std::memory_order_relaxed); };
  while (!is_stopping()) {
    if (auto damage = next_report()) return damage;
    const double period_s = period_s_.load(std::memory_order_relaxed);
    const int64_t pause_ns = sum_up_one();
    store_->reports().wait(pause_ns, [&] {
      return is_stopping() || period_s_.load(std::memory_order_relaxed) != period_s;
    });
  }
  return std::nullopt;
}

// A shard may be gone since, or loaded anew; then the report was of another one.
std::optional<Damage> Scrubber::next_report() {
  while (const auto damage = store_->reports().take()) {
    const auto shard = store_->at_or_after(damage->shard_number);
    if (shard == nullptr || shard->number() != damage->shard_number ||
        !shard->is_damaged(damage->local_expert_id))
      continue;
    damages_.fetch_add(1, std::memory_order_relaxed);
    return damage;
  }
  return std::nullopt;
}

// Returns the nanoseconds to the next expert.
int64_t Scrubber::sum_up_one() {
  const double period_s = period_s_.load(std::memory_order_relaxed);
  if (!(period_s > 0)) return kEmptyNs;
  for (;;) {
    const auto shard = store_->at_or_after(number_);
    if (shard == nullptr) return kEmptyNs;
    if (shard->number() != number_) next_expert_ = 0;
    number_ = shard->number();
    const uint32_t expert = next_expert_++;
    if (expert >= shard->facts().num_local_experts) {
      ++number_;  // wraps around to the lowest
      next_expert_ = 0;
      continue;
    }
    const int64_t begun_ns = thread_cpu_ns();
    const auto read = shard->scrub_expert(expert, stopping_);
    const int64_t used_ns = thread_cpu_ns() - begun_ns;
    if (!read.ok() || read.value() == 0) return kEmptyNs;
    scrubbed_bytes_.fetch_add(read.value(), std::memory_order_relaxed);
    const auto num_experts = static_cast<double>(std::max<uint64_t>(store_->num_experts(), 1));
    return std::max(static_cast<int64_t>(period_s * 1e9 / num_experts), used_ns * kIdleShare);
  }
}

void Scrubber::set_period(double period_s) {
  period_s_.store(period_s, std::memory_order_relaxed);
  store_->reports().wake();
}

void Scrubber::stop() {
  stopping_.store(true, std::memory_order_relaxed);
  store_->reports().wake();
}

ScrubStats Scrubber::stats() const {
  return {scrubbed_bytes_.load(std::memory_order_relaxed),
          damages_.load(std::memory_order_relaxed)};
}

}  // namespace dflash::store
