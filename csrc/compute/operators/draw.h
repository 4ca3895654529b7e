// Chooses the token of a row of logits that a random number points at.
//
// A token weighs round(exp((logit - largest) / temperature) * 2^40), ties to even. Weights are
// integers, so that their sums do not depend on the order in which they are added. Filters keep all
// tokens that are as likely as the last one they keep.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace dflash::compute {

struct DrawForm {
  // 0: the most likely token, the first among equals, whatever the other fields say
  double temperature = 1.0;
  int64_t top_k = 0;     // the most likely that are kept; 0: all
  double top_p = 1.0;    // the fewest of the most likely that have this share are kept
  double min_p = 0.0;    // those as likely as this part of the most likely are kept
  double uniform = 0.0;  // in [0, 1): inverts the distribution in ascending order of ids
};

// What a draw returns where the row's largest logit is no finite number, or one is NaN.
inline constexpr int64_t kNotFinite = -1;

// Memory that draws of one thread use again.
struct DrawScratch {
  std::vector<double> maxima;    // of blocks of the row
  std::vector<uint32_t> blocks;  // those that are weighed, in ascending order
  std::vector<int64_t> weights;  // of their tokens, block after block
  std::vector<double> values;
  std::vector<int64_t> sorted;
};

// Returns the id of the token, or kNotFinite. A token of weight 0 is never returned. Rows have at
// most 2^22 values, so that sums of weights stay below 2^62.
int64_t draw_token(std::span<const float> logits, const DrawForm& form, DrawScratch& scratch);
int64_t draw_token(std::span<const double> logits, const DrawForm& form, DrawScratch& scratch);

}  // namespace dflash::compute
