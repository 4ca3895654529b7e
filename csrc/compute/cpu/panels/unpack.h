// Reads single outputs back out of panels (pack.h, panel_layout.h, pack_bf16_pairs.h): an embedding
// takes its rows from the one packed store. One output is one lane of a panel, so that its elements
// lie a step apart; reading 4,096 inputs touches each line of the panel, a few hundred KiB.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "compute/formats/weight_format.h"

namespace dflash::compute {

// Where one output lies.
struct PackedOutput {
  const std::byte* panel;
  WeightFormat format;
  uint32_t width;  // of the panel
  uint32_t lane;   // of the output, less than the width
  uint32_t inputs;
};

// Writes the `inputs` weights of an output to `values`, with the bits that dequantize() gives.
// The caller holds a CanonicalFloatMode.
void unpack_output(const PackedOutput& output, float* values);
// The same for a panel of pack_bf16_pairs.
void unpack_bf16_pairs(const PackedOutput& output, float* values);

}  // namespace dflash::compute
