// The worker's side reads ragged lists from memory that a peer could write; the checker's side
// reads the model's own arrays. They share the formula of one expert and nothing else.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/experts.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"

namespace dflash::simulation {
namespace {

constexpr int64_t kLongestPieceNs = 5'000'000;  // a worker counts progress at least every 20 ms

float expert_value(uint32_t expert, float value) {
  return value * (1.0f + 0.37f * static_cast<float>(expert)) - 0.11f * static_cast<float>(expert);
}

compute::FfnSpec toy_spec() {
  compute::FfnSpec spec;
  spec.in_size = spec.out_size = kRowWidth;
  spec.intermediate_size = 1;
  return spec;
}

class ToyLayer final : public compute::ExpertLayer {
 public:
  ToyLayer(std::vector<uint32_t> experts, ExpertsState& state)
      : spec_(toy_spec()), experts_(std::move(experts)), state_(state) {}

  const compute::FfnSpec& spec() const override { return spec_; }
  uint32_t num_local_experts() const override { return static_cast<uint32_t>(experts_.size()); }
  uint64_t resident_bytes() const override { return 0; }
  Status load_expert(uint32_t, const compute::ExpertWeights&, compute::YieldingProgress&) override {
    return ok();
  }
  std::optional<uint64_t> content_checksum(uint32_t) const override { return std::nullopt; }

  // Reads the rows at the beginning and writes the reply in the middle of the time that it takes,
  // as a kernel does that works block by block.
  Status forward(const compute::ForwardArgs& args, compute::YieldingProgress& progress) override {
    const auto pairs = static_cast<int64_t>(args.weights.size());
    const int64_t began_ns = now_ns();
    // Rows that were refused are computed again, uncut, to say which of a request is out of range.
    state_.on_compute(was_refused_ ? 0 : args.num_rows, experts_.size());
    was_refused_ = state_.next_refusal.has_value();
    if (was_refused_) return *std::exchange(state_.next_refusal, std::nullopt);
    std::vector<float> sums(size_t{args.num_rows} * kRowWidth, 0.0f);
    size_t pair = 0;
    for (uint32_t row = 0; row < args.num_rows; ++row) {
      float values[kRowWidth];
      std::memcpy(values, args.rows + row * sizeof values, sizeof values);
      for (uint16_t i = 0; i < args.row_counts[row]; ++i, ++pair) {
        const uint32_t expert = experts_[args.local_expert_ids[pair]];
        for (uint32_t column = 0; column < kRowWidth; ++column)
          sums[row * kRowWidth + column] +=
              args.weights[pair] * expert_value(expert, values[column]);
      }
    }
    take_time(pairs * state_.ns_per_pair / 2, progress);
    std::memcpy(args.reply, sums.data(), sums.size() * sizeof(float));
    take_time(pairs * state_.ns_per_pair / 2, progress);
    state_.longest_ns = std::max(state_.longest_ns, now_ns() - began_ns);
    return ok();
  }

 private:
  // In pieces, so that a slowness which ends or begins meanwhile has its effect at once.
  void take_time(int64_t work_ns, compute::YieldingProgress& progress) const {
    while (work_ns > 0) {
      const double slowdown = state_.slowdown;
      const auto piece = std::min(
          work_ns, static_cast<int64_t>(static_cast<double>(kLongestPieceNs) / slowdown) + 1);
      nap_ns(static_cast<int64_t>(static_cast<double>(piece) * slowdown));
      progress.count_and_yield();
      work_ns -= piece;
    }
  }

  const compute::FfnSpec spec_;
  const std::vector<uint32_t> experts_;
  ExpertsState& state_;
  bool was_refused_ = false;  // the batch before
};

}  // namespace

std::shared_ptr<store::ResidentShard> make_shard(const std::vector<uint32_t>& experts,
                                                 uint64_t fingerprint, ExpertsState& state) {
  store::ShardFacts facts;
  facts.spec = toy_spec();
  facts.num_local_experts = static_cast<uint32_t>(experts.size());
  facts.formats = Dtype::kF32;
  facts.weights_fingerprint = fingerprint;
  store::ResidentShard::OfStore of_store;
  of_store.turns = state.turns;
  return std::make_shared<store::ResidentShard>(
      facts, nullptr, std::make_unique<ToyLayer>(experts, state), 0, std::move(of_store));
}

std::vector<float> expected_output(const Rows& rows,
                                   const std::vector<std::vector<uint32_t>>& shards) {
  std::vector<float> output(rows.hidden_states.size(), 0.0f);
  for (uint32_t token = 0; token < rows.num_tokens; ++token) {
    for (const auto& shard : shards) {
      float sums[kRowWidth] = {};
      bool has_any = false;
      for (const uint32_t expert : shard) {
        for (uint32_t k = 0; k < rows.top_k; ++k) {
          const size_t at = size_t{token} * rows.top_k + k;
          if (static_cast<uint32_t>(rows.topk_ids[at]) != expert) continue;
          has_any = true;
          for (uint32_t column = 0; column < kRowWidth; ++column)
            sums[column] +=
                rows.topk_weights[at] *
                expert_value(expert, rows.hidden_states[size_t{token} * kRowWidth + column]);
        }
      }
      for (uint32_t column = 0; has_any && column < kRowWidth; ++column)
        output[size_t{token} * kRowWidth + column] += sums[column];
    }
  }
  return output;
}

}  // namespace dflash::simulation
