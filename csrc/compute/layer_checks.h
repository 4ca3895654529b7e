// The checks that every ExpertLayer makes before it computes, so that backends refuse the same
// things with the same words.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "compute/expert_layer.h"

namespace dflash::compute {

// Shapes and presence of an expert's tensors against the spec. Errors: kInvalidArgument naming the
// tensor and both shapes.
Status check_expert(const FfnSpec& spec, uint32_t num_local_experts, uint32_t local_expert_id,
                    const ExpertWeights& weights);

// Counts, ids and pointers of a batch. Errors: kInvalidArgument.
Status check_batch(const ForwardArgs& args, uint32_t num_local_experts);

// What the values of a stored matrix must not hold, because no finite result could come of it: NaN
// or infinity among the scales of a quantised format, or anywhere where weights are quantised at
// load. Errors: kCheckpoint naming tensor, output and input. Outputs [first_output, first_output +
// num_outputs).
Status check_values(const char* name, const MatrixView& matrix, WeightFormat resident,
                    uint32_t first_output, uint32_t num_outputs);

// Which stored formats a resident one takes: itself; f32 takes all, int8_g32 and int4_g32 take
// floats. Errors: kUnsupported.
Status check_resident(const char* name, const MatrixView& matrix, WeightFormat resident);

// A bias as float32 [count, padded with zeros to padded_count]; empty if absent.
std::vector<float> widen_vector(const VectorView& vector, uint32_t padded_count);

// The kRange error for one value.
Error range_error(uint32_t row, uint32_t column, float value, Dtype dtype);

// True if narrowing a finite `value` to `dtype` gives infinity.
bool overflows(float value, Dtype dtype);

}  // namespace dflash::compute
