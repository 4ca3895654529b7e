// Seeded experts and batches for the compute tests: weights in any dtype and layout, views into
// them, and ready ForwardArgs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "base/dtype.h"
#include "compute/experts/content_checksum.h"
#include "compute/experts/expert_layer.h"

namespace dflash::compute::toy {

inline std::vector<std::byte> encode(Dtype dtype, const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * dtype_bytes(dtype));
  static_cast<void>(convert(Dtype::kF32, reinterpret_cast<const std::byte*>(values.data()), dtype,
                            bytes.data(), values.size()));
  return bytes;
}

inline std::vector<float> random_floats(std::mt19937& random, size_t count, float scale) {
  std::vector<float> values(count);
  std::normal_distribution<float> normal(0.0f, scale);
  for (float& value : values) value = normal(random);
  return values;
}

// What an expert's source bytes add up to, read in steps of any size.
inline uint64_t read_all(const ExpertWeights& weights, size_t step_bytes = size_t{1} << 20) {
  ContentReader reader(weights);
  while (!reader.read(step_bytes).value()) {
  }
  return reader.value();
}

struct Expert {
  std::vector<std::byte> gate, up, down, gate_bias, up_bias, down_bias;
};

class Experts {
 public:
  Experts(const FfnSpec& spec, uint32_t count, Dtype dtype, uint32_t seed)
      : spec_(spec), dtype_(dtype), experts_(count) {
    std::mt19937 random(seed);
    const float in_scale = 1.0f / std::sqrt(static_cast<float>(spec.in_size));
    const float mid_scale = 1.0f / std::sqrt(static_cast<float>(spec.intermediate_size));
    const size_t first = size_t{spec.intermediate_size} * spec.in_size,
                 second = size_t{spec.out_size} * spec.intermediate_size;
    for (Expert& e : experts_) {
      e.gate = encode(dtype, random_floats(random, first, in_scale));
      e.up = encode(dtype, random_floats(random, first, in_scale));
      e.down = encode(dtype, random_floats(random, second, mid_scale));
      e.gate_bias = encode(dtype, random_floats(random, spec.intermediate_size, 0.2f));
      e.up_bias = encode(dtype, random_floats(random, spec.intermediate_size, 0.2f));
      e.down_bias = encode(dtype, random_floats(random, spec.out_size, 0.2f));
    }
  }

  MatrixView matrix(const std::vector<std::byte>& bytes, uint32_t outputs, uint32_t inputs) const {
    return {bytes.data(), format_of(dtype_), outputs, inputs, inputs, 1};
  }
  ExpertWeights weights(uint32_t id) const {
    const Expert& e = experts_[id];
    ExpertWeights w;
    const bool has_gate = spec_.gate != GateKind::kNone;
    if (has_gate) w.gate = matrix(e.gate, spec_.intermediate_size, spec_.in_size);
    w.up = matrix(e.up, spec_.intermediate_size, spec_.in_size);
    w.down = matrix(e.down, spec_.out_size, spec_.intermediate_size);
    if (has_gate && spec_.has_gate_up_bias)
      w.gate_bias = {e.gate_bias.data(), dtype_, spec_.intermediate_size, 1};
    if (spec_.has_gate_up_bias) w.up_bias = {e.up_bias.data(), dtype_, spec_.intermediate_size, 1};
    if (spec_.has_down_bias) w.down_bias = {e.down_bias.data(), dtype_, spec_.out_size, 1};
    return w;
  }
  std::vector<ExpertWeights> all_weights() const {
    std::vector<ExpertWeights> all;
    for (uint32_t id = 0; id < experts_.size(); ++id) all.push_back(weights(id));
    return all;
  }
  Status load_into(ExpertLayer& layer) const {
    YieldingProgress progress{0};
    for (uint32_t id = 0; id < experts_.size(); ++id)
      DFLASH_TRY(layer.load_expert(id, weights(id), progress));
    return ok();
  }
  const FfnSpec& spec() const { return spec_; }
  uint32_t count() const { return static_cast<uint32_t>(experts_.size()); }
  Dtype dtype() const { return dtype_; }
  const Expert& expert(uint32_t id) const { return experts_[id]; }

 private:
  FfnSpec spec_;
  Dtype dtype_;
  std::vector<Expert> experts_;
};

// Rows with their pairs. Values are public so that a test can plant what it wants.
struct Batch {
  std::vector<float> rows;  // [num_rows, in_size]
  std::vector<uint16_t> row_counts;
  std::vector<uint16_t> ids;
  std::vector<float> weights;
  Dtype row_dtype = Dtype::kF32;
  Dtype reply_dtype = Dtype::kF32;

  static Batch random(const FfnSpec& spec, uint32_t num_experts, uint32_t num_rows,
                      uint32_t max_pairs, uint32_t seed) {
    std::mt19937 random(seed);
    Batch batch;
    batch.rows = random_floats(random, size_t{num_rows} * spec.in_size, 1.0f);
    for (uint32_t r = 0; r < num_rows; ++r) {
      const uint32_t count = static_cast<uint32_t>(random() % (max_pairs + 1));
      batch.row_counts.push_back(static_cast<uint16_t>(count));
      for (uint32_t n = 0; n < count; ++n) {  // unsorted, with duplicates
        batch.ids.push_back(static_cast<uint16_t>(random() % num_experts));
        batch.weights.push_back(random() % 8 == 0 ? 0.0f
                                                  : static_cast<float>(random() % 1000) / 1000.0f);
      }
    }
    return batch;
  }
  // Rows that all go to expert `id` alone: of so many of one expert as kernels see.
  static Batch of_one_expert(const FfnSpec& spec, uint32_t num_rows, uint16_t id, uint32_t seed,
                             float weight = 0.75f) {
    Batch batch = random(spec, 1, num_rows, 0, seed);
    batch.row_counts.assign(num_rows, 1);
    batch.ids.assign(num_rows, id);
    batch.weights.assign(num_rows, weight);
    return batch;
  }
  uint32_t num_rows() const { return static_cast<uint32_t>(row_counts.size()); }
  // Rows [begin, end) with their pairs.
  Batch slice(uint32_t begin, uint32_t end) const {
    const auto width = static_cast<std::ptrdiff_t>(rows.size() / num_rows());
    const auto from = std::accumulate(row_counts.begin(), row_counts.begin() + begin, 0),
               to = std::accumulate(row_counts.begin(), row_counts.begin() + end, 0);
    Batch part;
    part.rows.assign(rows.begin() + begin * width, rows.begin() + end * width);
    part.row_counts.assign(row_counts.begin() + begin, row_counts.begin() + end);
    part.ids.assign(ids.begin() + from, ids.begin() + to);
    part.weights.assign(weights.begin() + from, weights.begin() + to);
    part.row_dtype = row_dtype, part.reply_dtype = reply_dtype;
    return part;
  }

  // Runs a forward; `reply` takes the reply's bytes.
  Status run(ExpertLayer& layer, std::vector<std::byte>& reply) const {
    const std::vector<std::byte> encoded = encode(row_dtype, rows);
    reply.assign(size_t{num_rows()} * layer.spec().out_size * dtype_bytes(reply_dtype),
                 std::byte{0xee});
    YieldingProgress progress{0};
    return layer.forward(args(encoded, reply), progress);
  }
  ForwardArgs args(const std::vector<std::byte>& encoded, std::vector<std::byte>& reply) const {
    return {encoded.data(), row_dtype,    num_rows(), row_counts, ids,
            weights,        reply.data(), reply_dtype};
  }
};

inline FfnSpec spec_of(uint32_t in, uint32_t intermediate, uint32_t out) {
  FfnSpec spec;
  spec.in_size = in;
  spec.intermediate_size = intermediate;
  spec.out_size = out;
  return spec;
}

inline std::vector<std::byte> reply_of(ExpertLayer& layer, const Batch& batch) {
  std::vector<std::byte> reply;
  const Status status = batch.run(layer, reply);
  REQUIRE_MESSAGE(status.ok(), (status.ok() ? "" : status.error().message));
  return reply;
}

}  // namespace dflash::compute::toy
