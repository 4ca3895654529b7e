// What the tests of files of panels share: a small layer, its packed experts as they lie in a file,
// and calls of some rows.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "store/direct_file.h"
#include "store/resident_shard.h"

namespace dflash::store::toy {

inline compute::FfnSpec panel_spec(bool has_biases) {
  compute::FfnSpec spec;
  spec.in_size = 128;
  spec.intermediate_size = 96;
  spec.out_size = 120;
  spec.has_gate_up_bias = spec.has_down_bias = has_biases;
  return spec;
}

// One expert begins so many bytes after the one before it.
inline uint64_t step_of(const ResidentShard& shard) {
  constexpr uint64_t kBlock = DirectFile::kBlockBytes;
  return (shard.panel_form()->num_bytes() + kBlock - 1) / kBlock * kBlock;
}

// The experts of a packed shard, one after another, as a file has them behind its header.
inline std::vector<std::byte> panels_of(const ResidentShard& shard) {
  const uint32_t count = shard.facts().num_local_experts;
  std::vector<std::byte> content(count * step_of(shard));
  for (uint32_t id = 0; id < count; ++id) {
    auto at = content.begin() + static_cast<std::ptrdiff_t>(id * step_of(shard));
    for (const auto& piece : shard.packed(id).pieces)
      at = std::copy(piece.begin(), piece.end(), at);
  }
  return content;
}

// Computes `num_rows` rows, each with all of `ids`, which ascend.
inline Status forward(ResidentShard& shard, const std::vector<uint16_t>& ids, uint32_t num_rows,
                      std::vector<float>& reply) {
  const compute::FfnSpec& spec = shard.facts().spec;
  std::vector<float> rows(size_t{num_rows} * spec.in_size);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = 0.01F * static_cast<float>(i % 97);
  std::vector<uint16_t> counts(num_rows, static_cast<uint16_t>(ids.size())), all;
  for (uint32_t row = 0; row < num_rows; ++row) all.insert(all.end(), ids.begin(), ids.end());
  const std::vector<float> weights(all.size(), 0.5F);
  reply.assign(size_t{num_rows} * spec.out_size, 0.0F);
  compute::ForwardArgs args;
  args.rows = reinterpret_cast<const std::byte*>(rows.data());
  args.num_rows = num_rows;
  args.row_counts = counts;
  args.local_expert_ids = all;
  args.weights = weights;
  args.reply = reinterpret_cast<std::byte*>(reply.data());
  compute::YieldingProgress progress;
  return shard.forward(args, progress);
}

inline std::vector<float> replied(ResidentShard& shard, const std::vector<uint16_t>& ids,
                                  uint32_t num_rows = 1) {
  std::vector<float> reply;
  const Status computed = forward(shard, ids, num_rows, reply);
  REQUIRE_MESSAGE(computed.ok(), (computed.ok() ? std::string() : computed.error().message));
  return reply;
}

}  // namespace dflash::store::toy
