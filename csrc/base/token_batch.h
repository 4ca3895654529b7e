// One call of the routed experts of a layer, as every room above the transports knows it. The value
// is made once, by ExpertRuntime.experts, and travels unchanged to the client (client/) or to the
// host's device (a device step). It owns nothing.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace dflash {

// Addresses are the processor's for the client and the device's for a device step. All of them must
// stay valid, and the inputs unchanged, until the call is done.
struct TokenBatch {
  // [num_tokens, in_size] in `dtype`. Elements of a row are adjacent; rows lie row_stride_bytes
  // apart.
  const std::byte* hidden_states = nullptr;
  int64_t row_stride_bytes = 0;
  Dtype dtype = Dtype::kF32;
  uint32_t num_tokens = 0;
  uint32_t top_k = 0;
  // [num_tokens, top_k], contiguous, int32 or int64. The number of experts is a sentinel, which
  // asks for nothing. Any other id that is no expert is an error.
  const void* topk_ids = nullptr;
  bool ids_are_64bit = false;
  // [num_tokens, top_k], contiguous, in `weights_dtype`; they are widened exactly to float32.
  const std::byte* topk_weights = nullptr;
  Dtype weights_dtype = Dtype::kF32;
  // [num_tokens, out_size], contiguous, in `dtype`; every element gets written.
  std::byte* output = nullptr;
};

}  // namespace dflash
