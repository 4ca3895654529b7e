// Random weights in any stored format, for benchmarks. Their bits are valid, and their scales keep
// activations in range.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <random>
#include <vector>

#include "compute/experts/expert_layer.h"

namespace dflash::compute {

// A matrix that owns its bytes.
class RandomMatrix {
 public:
  // `format` is a resident one. A format that is only made at load is stored as bf16.
  RandomMatrix(uint32_t outputs, uint32_t inputs, WeightFormat format, std::mt19937_64& random);
  const MatrixView& view() const { return view_; }

 private:
  void fill_floats(std::mt19937_64& random);
  void fill_blocks(std::mt19937_64& random);
  void put_block_scales(std::byte* block) const;

  std::vector<std::byte> values_, scales_;
  MatrixView view_;
};

// One expert's random weights in its resident formats, without biases.
class RandomExpert {
 public:
  RandomExpert(const FfnSpec& spec, ResidentFormats formats, uint64_t seed);
  ExpertWeights weights() const;

 private:
  RandomExpert(const FfnSpec& spec, ResidentFormats formats, std::mt19937_64&& random);
  bool has_gate_;
  RandomMatrix gate_, up_, down_;
};

}  // namespace dflash::compute
