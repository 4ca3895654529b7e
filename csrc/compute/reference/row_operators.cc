// The row operators in words. They are written for reading; the only thing shared with the kernels
// is the formulas of exp, sigmoid and the activations, one lane at a time.
// SPDX-License-Identifier: Apache-2.0
#include "compute/reference/row_operators.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "compute/experts/activation.h"
#include "compute/vector_scalar.h"

namespace dflash::compute {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float canonical(float value) { return ScalarVector::canonical_nan(value); }

// Element i goes into partial sum i % 16; add(element, partial) is the new partial sum. The partial
// sums are added in the order 0..15.
template <class Add>
float sum_of(std::span<const float> values, Add add) {
  std::array<float, 16> partials = {};
  for (size_t i = 0; i < values.size(); ++i) partials[i % 16] = add(values[i], partials[i % 16]);
  return std::accumulate(partials.begin() + 1, partials.end(), partials[0]);
}
float plain_sum(std::span<const float> values) {
  return sum_of(values, [](float value, float partial) { return partial + value; });
}

// Whether `a` stands before `b` in descending order, where a NaN is larger than every number.
bool is_higher(float a, float b) {
  if (std::isnan(a)) return !std::isnan(b);
  return a > b;
}

// The places of the `wanted` highest values; a stable sort leaves equal ones in ascending order.
std::vector<uint32_t> highest(std::span<const float> values, uint32_t wanted) {
  std::vector<uint32_t> places(values.size());
  std::iota(places.begin(), places.end(), 0u);
  std::stable_sort(places.begin(), places.end(),
                   [&](uint32_t a, uint32_t b) { return is_higher(values[a], values[b]); });
  places.resize(wanted);
  return places;
}

std::vector<float> softmax(std::span<const float> x) {
  float top = -kInfinity;
  for (const float value : x) top = value > top ? value : top;
  std::vector<float> e;
  for (const float value : x) e.push_back(exp<ScalarVector>(value - top));
  const float sum = plain_sum(e);
  for (float& value : e) value = canonical(value / sum);
  return e;
}

std::vector<float> sigmoids(std::span<const float> x) {
  std::vector<float> result;
  for (const float value : x) result.push_back(canonical(sigmoid<ScalarVector>(value)));
  return result;
}

void exclude(const RouterForm& form, std::vector<float>& choice) {
  const size_t size = form.num_experts / form.num_groups;
  std::vector<float> groups;
  for (size_t g = 0; g < form.num_groups; ++g) {
    const std::span<const float> values(choice.data() + g * size, size);
    const auto best = highest(values, form.group_score == GroupScore::kMax ? 1 : 2);
    groups.push_back(form.group_score == GroupScore::kMax ? values[best[0]]
                                                          : values[best[0]] + values[best[1]]);
  }
  const auto chosen = highest(groups, form.topk_groups);
  for (size_t expert = 0; expert < choice.size(); ++expert) {
    if (std::find(chosen.begin(), chosen.end(), expert / size) == chosen.end())
      choice[expert] = form.excluded;
  }
}

}  // namespace

std::vector<float> reference_norm(const NormForm& form, std::span<const float> x,
                                  const float* weight, const float* bias) {
  const auto width = static_cast<float>(x.size());
  const float mean = form.kind == NormKind::kLayer ? plain_sum(x) / width : 0.0f;
  std::vector<float> d(x.begin(), x.end());
  if (form.kind == NormKind::kLayer) {
    for (float& value : d) value = value - mean;
  }
  const float squares =
      sum_of(d, [](float value, float partial) { return std::fmaf(value, value, partial); });
  const float r = 1.0f / std::sqrt(squares / width + form.epsilon);
  for (size_t i = 0; i < d.size(); ++i) {
    const float w = weight == nullptr ? 1.0f : form.adds_one ? 1.0f + weight[i] : weight[i];
    d[i] = canonical(bias == nullptr ? d[i] * r * w : std::fmaf(d[i] * r, w, bias[i]));
  }
  return d;
}

std::vector<float> reference_rotate(const RotaryForm& form, std::span<const float> row,
                                    const float* cos, const float* sin) {
  std::vector<float> result(row.begin(), row.end());
  const size_t pairs = form.rotary_dim / 2;
  for (size_t head = 0; head < form.num_heads; ++head) {
    const size_t begin = head * form.head_dim + form.rotary_offset;
    for (size_t i = 0; i < pairs; ++i) {
      const bool reads_halves = form.layout == RotaryLayout::kHalves;
      const bool writes_pairs = form.layout == RotaryLayout::kInterleaved;
      const float x1 = row[begin + (reads_halves ? i : 2 * i)];
      const float x2 = row[begin + (reads_halves ? i + pairs : 2 * i + 1)];
      // The places of the results among the rotated values, where full tables have their entries.
      const size_t first = writes_pairs ? 2 * i : i;
      const size_t second = writes_pairs ? 2 * i + 1 : i + pairs;
      const size_t first_entry = form.has_full_tables ? first : i;
      const size_t second_entry = form.has_full_tables ? second : i;
      result[begin + first] =
          canonical(std::fmaf(x1, cos[first_entry], 0.0f - x2 * sin[first_entry]));
      result[begin + second] = canonical(std::fmaf(x2, cos[second_entry], x1 * sin[second_entry]));
    }
  }
  return result;
}

namespace {

std::vector<float> mixed_sparsely(const RouterForm& form, std::span<const float> logits,
                                  const std::vector<uint32_t>& chosen) {
  const float below_all = -std::numeric_limits<float>::infinity();
  std::vector<float> left(logits.begin(), logits.end()), weights;
  for (const uint32_t id : chosen) {
    const float top = logits[id];
    std::vector<float> near = left;
    for (size_t i = 0; i < near.size(); ++i) {
      const float factor = std::fabs(logits[i]) > top ? std::fabs(logits[i]) : top;
      if ((top - logits[i]) / factor > form.mixer_threshold) near[i] = below_all;
    }
    weights.push_back(softmax(near)[id]);
    left[id] = below_all;
  }
  return weights;
}

}  // namespace

RoutedRow reference_route(const RouterForm& form, std::span<const float> logits, const float* bias,
                          const float* expert_scales) {
  std::vector<float> scores(logits.begin(), logits.end());
  if (form.score == RouterScore::kSoftmax) scores = softmax(logits);
  if (form.score == RouterScore::kSigmoid) scores = sigmoids(logits);
  std::vector<float> choice = scores;
  for (size_t i = 0; bias != nullptr && i < choice.size(); ++i) choice[i] = choice[i] + bias[i];
  if (form.num_groups > 1) exclude(form, choice);
  RoutedRow routed{highest(choice, form.top_k), {}};
  std::vector<float>& weights = routed.topk_weights;
  for (const uint32_t id : routed.topk_ids)
    weights.push_back(form.weight == RouterWeight::kScore ? scores[id] : logits[id]);
  if (form.weight == RouterWeight::kSoftmaxOfChosen) weights = softmax(weights);
  if (form.weight == RouterWeight::kSigmoidOfChosen) weights = sigmoids(weights);
  if (form.weight == RouterWeight::kSparseMixer)
    weights = mixed_sparsely(form, logits, routed.topk_ids);
  float divisor = plain_sum(weights) + form.sum_epsilon;
  if (divisor < form.sum_floor) divisor = form.sum_floor;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (form.normalizes) weights[i] = weights[i] / divisor;
    weights[i] = weights[i] * form.scale;
    if (expert_scales != nullptr) weights[i] = weights[i] * expert_scales[routed.topk_ids[i]];
    weights[i] = canonical(weights[i]);
  }
  return routed;
}

std::vector<float> reference_gate(const FfnSpec& spec, std::span<const float> g,
                                  std::span<const float> u) {
  std::vector<float> result;
  for (size_t i = 0; i < u.size(); ++i) {
    const float gate_value = spec.gate == GateKind::kNone ? 0.0f : g[i];
    result.push_back(canonical(gate<ScalarVector>(spec, gate_value, u[i])));
  }
  return result;
}

std::vector<float> reference_add_scaled(std::span<const float> x, const float* base,
                                        const float* gate, float scale) {
  const float s = gate == nullptr ? scale : sigmoid<ScalarVector>(*gate);
  std::vector<float> result;
  for (size_t i = 0; i < x.size(); ++i)
    result.push_back(canonical(base == nullptr ? x[i] * s : std::fmaf(x[i], s, base[i])));
  return result;
}

int64_t reference_argmax(std::span<const float> values) {
  int64_t best = -1;
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i])) continue;
    if (best < 0 || values[i] > values[static_cast<size_t>(best)]) best = static_cast<int64_t>(i);
  }
  return best < 0 ? 0 : best;
}

}  // namespace dflash::compute
