// The checks that every ExpertLayer makes before and while it computes, so that backends refuse the
// same things with the same words.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mutex>
#include <optional>
#include <span>

#include "compute/experts/expert_layer.h"

namespace dflash::compute {

// Checks the shapes and the presence of an expert's tensors against the spec. Errors:
// kInvalidArgument naming the tensor and both shapes; kUnsupported where rows are no multiple of
// the format's block.
Status check_expert(const FfnSpec& spec, uint32_t num_local_experts, uint32_t local_expert_id,
                    const ExpertWeights& weights);

// Checks the counts, ids and pointers of a batch. Errors: kInvalidArgument.
Status check_batch(const ForwardArgs& args, uint32_t num_local_experts);

// Makes the kRange error for one value.
Error range_error(uint32_t row, uint32_t column, float value, Dtype dtype);

// Returns true if narrowing a finite `value` to `dtype` gives infinity.
bool overflows(float value, Dtype dtype);

// Finds the value that an error names where tasks of several threads narrow rows: the first in the
// order of rows, then of columns, so that the error is the same whatever threads do. Any thread.
class FirstOverflow {
 public:
  // Looks for values of a row that became infinite when they were narrowed to `dtype`; the first
  // of them lies in `first_column`.
  void keep(uint32_t row, uint32_t first_column, std::span<const float> values, Dtype dtype);
  // Errors: kRange "row R, column C: value ... exceeds the range of f16" where one was kept.
  Status take();

 private:
  struct Place {
    uint32_t row, column;
    float value;
    Dtype dtype;
  };
  std::mutex mutex_;
  std::optional<Place> first_;
};

}  // namespace dflash::compute
