// The choice of experts from the router's logits of a row:
//
//   score     softmax, sigmoid, or the logits themselves
//   choice    score + bias, where there is a bias; then `excluded` for experts outside the
//             topk_groups groups with the highest group scores, where there are groups
//   ids       the top_k experts with the highest choice, in descending order of it; of equal values
//             the lowest id comes first, and so it is for groups
//   weights   the scores of the chosen, or softmax or sigmoid of their logits, or what a sparse
//   mixer
//             gives them (arXiv:2409.12136): for each in its turn, softmax over the experts that
//             have not had their turn and whose logit x is near the chosen one's, t:
//             (t - x) / max(|x|, t) <= mixer_threshold; then each is divided
//             by max(sum + sum_epsilon, sum_floor) if the form normalises, times `scale`, and times
//             the expert's own scale where there are such
//
// In the choice a NaN counts as larger than every number, as in torch, so that it shows in the
// row's output. softmax(x)[i] = e[i] / sum(e) with e = exp(x - max(x)); sums are those of lanes.h,
// over the chosen in their order. Which form a model's router has is data, never code.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/experts/activation.h"
#include "compute/operators/lanes.h"
#include "compute/operators/rows.h"

namespace dflash::compute {

enum class RouterScore : uint8_t { kSoftmax, kSigmoid, kIdentity };

// What the weights are before they are normalised and scaled.
enum class RouterWeight : uint8_t { kScore, kSoftmaxOfChosen, kSigmoidOfChosen, kSparseMixer };

// What a group of experts is worth: its highest choice, or the sum of its two highest.
enum class GroupScore : uint8_t { kMax, kTopTwoSum };

// The most experts of a layer and the most groups, which bound the arrays of a row.
inline constexpr uint32_t kMaxRouterExperts = 16384;
inline constexpr uint32_t kMaxRouterGroups = 256;

struct RouterForm {
  uint32_t num_experts = 0;
  uint32_t top_k = 0;
  RouterScore score = RouterScore::kSoftmax;
  RouterWeight weight = RouterWeight::kScore;
  uint32_t num_groups = 1;  // of num_experts / num_groups experts each
  uint32_t topk_groups = 1;
  GroupScore group_score = GroupScore::kTopTwoSum;
  float excluded = -__builtin_inff();  // the choice of experts outside the chosen groups
  bool normalizes = false;
  float sum_epsilon = 0.0f;
  float sum_floor = -__builtin_inff();
  float scale = 1.0f;
  float mixer_threshold = 0.0f;  // of kSparseMixer
};

// One row for a kernel.
struct RouterRow {
  const RouterForm* form;
  const float* logits;         // [num_experts]
  const float* bias;           // [num_experts], added for the choice only; null: none
  const float* expert_scales;  // [num_experts]; null: none
  float* scores;               // [num_experts] of scratch
  float* choice;               // [num_experts] of scratch
  uint32_t* topk_ids;          // [top_k], written
  float* topk_weights;         // [top_k], written
};

// NaN is above every number.
template <class V>
inline bool is_above(float a, float b) {
  return a > b || (a != a && b == b);
}

// The ids of the `wanted` <= count highest values, descending, equal ones by ascending id.
template <class V>
inline void take_highest(const float* values, uint32_t count, uint32_t wanted, uint32_t* ids) {
  uint32_t held = 0;
  for (uint32_t i = 0; i < count; ++i) {
    if (held == wanted && !is_above<V>(values[i], values[ids[held - 1]])) continue;
    uint32_t place = held < wanted ? held++ : wanted - 1;
    for (; place > 0 && is_above<V>(values[i], values[ids[place - 1]]); --place)
      ids[place] = ids[place - 1];
    ids[place] = i;
  }
}

// `out` may be `x`. Values behind the row's end count as exp(-infinity), which is zero.
template <class V>
inline void softmax_row(const float* x, uint32_t count, float* out) {
  using F = typename V::F;
  const float below_all = -__builtin_inff();
  LaneBlock<V> high = fill_block<V>(below_all), sums = fill_block<V>(0.0f);
  in_blocks<V>(count, [&](uint32_t first, uint32_t size) {
    high = map_block<V>([](F a, F b) { return V::max(a, b); },  // keeps b where a is NaN
                        load_block<V>(x + first, size, below_all), high);
  });
  float lanes[kBlockLanes];
  store_block<V>(lanes, high, kBlockLanes);
  float top = lanes[0];
  for (float lane : lanes) top = lane > top ? lane : top;
  in_blocks<V>(count, [&](uint32_t first, uint32_t size) {
    const LaneBlock<V> e = map_block<V>([&](F a) { return exp<V>(V::sub(a, V::set1(top))); },
                                        load_block<V>(x + first, size, below_all));
    sums = map_block<V>([](F sum, F a) { return V::add(sum, a); }, sums, e);
    store_block<V>(out + first, e, size);
  });
  const float sum = sum_in_order<V>(sums);
  in_blocks<V>(count, [&](uint32_t first, uint32_t size) {
    store_block<V>(out + first,
                   map_block<V>([&](F e) { return V::div(e, V::set1(sum)); },
                                load_block<V>(out + first, size, 0.0f)),
                   size);
  });
}

template <class V>
inline void sigmoid_row(const float* x, uint32_t count, float* out) {
  in_blocks<V>(count, [&](uint32_t first, uint32_t size) {
    store_block<V>(out + first,
                   map_block<V>([](typename V::F a) { return sigmoid<V>(a); },
                                load_block<V>(x + first, size, 0.0f)),
                   size);
  });
}

// Gives the experts outside the chosen groups the choice `excluded`.
template <class V>
inline void exclude_groups(const RouterForm& form, float* choice) {
  const uint32_t size = form.num_experts / form.num_groups;
  float scores[kMaxRouterGroups];
  uint32_t ids[kMaxRouterGroups];
  for (uint32_t g = 0; g < form.num_groups; ++g) {
    const float* values = choice + static_cast<size_t>(g) * size;
    const bool is_sum = form.group_score == GroupScore::kTopTwoSum;
    take_highest<V>(values, size, is_sum ? 2 : 1, ids);
    scores[g] = is_sum ? values[ids[0]] + values[ids[1]] : values[ids[0]];
  }
  take_highest<V>(scores, form.num_groups, form.topk_groups, ids);
  bool is_chosen[kMaxRouterGroups] = {};
  for (uint32_t i = 0; i < form.topk_groups; ++i) is_chosen[ids[i]] = true;
  for (uint32_t expert = 0; expert < form.num_experts; ++expert) {
    if (!is_chosen[expert / size]) choice[expert] = form.excluded;
  }
}

// Gives the chosen experts the weights of a sparse mixer.
template <class V>
inline void mix_sparsely(const RouterRow& row) {
  const float below_all = -__builtin_inff();
  const uint32_t num_experts = row.form->num_experts;
  for (uint32_t turn = 0; turn < row.form->top_k; ++turn) {
    const float top = row.logits[row.topk_ids[turn]];
    for (uint32_t i = 0; i < num_experts; ++i) {
      const float x = row.logits[i], size = x < 0.0f ? -x : x;
      const bool is_far = (top - x) / (size > top ? size : top) > row.form->mixer_threshold;
      row.scores[i] = is_far ? below_all : x;
    }
    for (uint32_t i = 0; i < turn; ++i) row.scores[row.topk_ids[i]] = below_all;
    softmax_row<V>(row.scores, num_experts, row.scores);
    row.topk_weights[turn] = row.scores[row.topk_ids[turn]];
  }
}

// The weights of the chosen experts, of which row.topk_weights has scores or logits.
template <class V>
inline void finish_weights(const RouterRow& row) {
  using F = typename V::F;
  const RouterForm& form = *row.form;
  float* w = row.topk_weights;
  if (form.weight == RouterWeight::kSoftmaxOfChosen) softmax_row<V>(w, form.top_k, w);
  if (form.weight == RouterWeight::kSigmoidOfChosen) sigmoid_row<V>(w, form.top_k, w);
  float divisor = 1.0f;
  if (form.normalizes) {
    LaneBlock<V> sums = fill_block<V>(0.0f);
    in_blocks<V>(form.top_k, [&](uint32_t first, uint32_t count) {
      sums = map_block<V>([](F sum, F a) { return V::add(sum, a); }, sums,
                          load_block<V>(w + first, count, 0.0f));
    });
    divisor = sum_in_order<V>(sums) + form.sum_epsilon;
    if (divisor < form.sum_floor) divisor = form.sum_floor;
  }
  in_blocks<V>(form.top_k, [&](uint32_t first, uint32_t count) {
    LaneBlock<V> block = load_block<V>(w + first, count, 0.0f);
    if (form.normalizes)
      block = map_block<V>([&](F a) { return V::div(a, V::set1(divisor)); }, block);
    block = map_block<V>([&](F a) { return V::mul(a, V::set1(form.scale)); }, block);
    if (row.expert_scales != nullptr) {
      float scales[kBlockLanes];
      for (uint32_t i = 0; i < count; ++i) scales[i] = row.expert_scales[row.topk_ids[first + i]];
      block = map_block<V>([](F a, F b) { return V::mul(a, b); }, block,
                           load_block<V>(scales, count, 0.0f));
    }
    store_block<V>(w + first, block, count);
  });
}

template <class V>
[[gnu::flatten]] void route_row(const RouterRow& row) {
  using F = typename V::F;
  const RouterForm& form = *row.form;
  const float* scores = row.logits;
  if (form.score == RouterScore::kSoftmax) softmax_row<V>(row.logits, form.num_experts, row.scores);
  if (form.score == RouterScore::kSigmoid) sigmoid_row<V>(row.logits, form.num_experts, row.scores);
  if (form.score != RouterScore::kIdentity) scores = row.scores;
  const float* choice = scores;
  if (row.bias != nullptr || form.num_groups > 1) {
    in_blocks<V>(form.num_experts, [&](uint32_t first, uint32_t count) {
      LaneBlock<V> block = load_block<V>(scores + first, count, 0.0f);
      if (row.bias != nullptr)
        block = map_block<V>([](F a, F b) { return V::add(a, b); }, block,
                             load_block<V>(row.bias + first, count, 0.0f));
      store_block<V>(row.choice + first, block, count);
    });
    if (form.num_groups > 1) exclude_groups<V>(form, row.choice);
    choice = row.choice;
  }
  take_highest<V>(choice, form.num_experts, form.top_k, row.topk_ids);
  const float* from = form.weight == RouterWeight::kScore ? scores : row.logits;
  for (uint32_t i = 0; i < form.top_k; ++i) row.topk_weights[i] = from[row.topk_ids[i]];
  if (form.weight == RouterWeight::kSparseMixer) mix_sparsely<V>(row);
  finish_weights<V>(row);
}

}  // namespace dflash::compute
