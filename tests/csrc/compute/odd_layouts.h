// One expert in every layout that checkpoints have: rows together, apart, alternating between gate
// and up, and the same transposed; biases that alternate too.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "stored_experts.h"

namespace dflash::compute::toy {

// An expert whose bytes a test may change.
struct LaidOutExpert {
  std::string name;
  FfnSpec spec;
  Dtype dtype;
  std::vector<std::byte> first, down, biases;  // gate and up in the first
  ExpertWeights weights;
};

// Widths that no panel, line or tile divides.
inline FfnSpec uneven_biased_spec() {
  FfnSpec spec = spec_of(70, 150, 77);
  spec.has_gate_up_bias = spec.has_down_bias = true;
  return spec;
}

inline std::unique_ptr<LaidOutExpert> laid_out(const std::string& name, Dtype dtype,
                                               uint32_t seed) {
  auto expert = std::make_unique<LaidOutExpert>();
  expert->name = name;
  expert->spec = uneven_biased_spec();
  expert->dtype = dtype;
  std::mt19937 random(seed);
  const uint32_t in = expert->spec.in_size, mid = expert->spec.intermediate_size,
                 out = expert->spec.out_size;
  const size_t element = dtype_bytes(dtype);
  expert->first = encode(dtype, random_floats(random, size_t{3} * mid * in, 0.1f));
  expert->down = encode(dtype, random_floats(random, size_t{2} * out * mid, 0.1f));
  expert->biases = encode(dtype, random_floats(random, size_t{2} * mid + out, 0.1f));
  struct Strides {
    int64_t output, input, up_at;  // elements; up's first is `up_at` behind gate's
  };
  const auto wide = static_cast<int64_t>(in), high = static_cast<int64_t>(mid);
  const Strides strides = name == "rows"               ? Strides{wide, 1, wide * high}
                          : name == "padded rows"      ? Strides{wide + 3, 1, (wide + 3) * high}
                          : name == "alternating rows" ? Strides{2 * wide, 1, wide}
                          : name == "transposed"       ? Strides{1, 2 * high, high}
                                                       : Strides{2, 2 * high, 1};
  const bool is_transposed = strides.input != 1;
  expert->weights.gate = {expert->first.data(), format_of(dtype), mid, in,
                          strides.output,       strides.input};
  expert->weights.up = expert->weights.gate;
  expert->weights.up.data += static_cast<size_t>(strides.up_at) * element;
  expert->weights.down = {expert->down.data(),      format_of(dtype),       out, mid,
                          is_transposed ? 1 : high, is_transposed ? out : 1};
  expert->weights.gate_bias = {expert->biases.data(), dtype, mid, 2};
  expert->weights.up_bias = {expert->biases.data() + element, dtype, mid, 2};
  expert->weights.down_bias = {expert->biases.data() + size_t{2} * mid * element, dtype, out, 1};
  return expert;
}

inline std::vector<std::unique_ptr<LaidOutExpert>> odd_layouts() {
  std::vector<std::unique_ptr<LaidOutExpert>> found;
  for (Dtype dtype : {Dtype::kBF16, Dtype::kF32}) {
    for (const char* name :
         {"rows", "padded rows", "alternating rows", "transposed", "alternating columns"})
      found.push_back(laid_out(name, dtype, 11 + static_cast<uint32_t>(dtype)));
  }
  return found;
}

}  // namespace dflash::compute::toy
