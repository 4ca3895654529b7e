// One pass over a row finds the largest value of each block. Most blocks have no token that weighs
// anything and are not looked at again.
// SPDX-License-Identifier: Apache-2.0
#include "compute/operators/draw.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace dflash::compute {
namespace {

// Values of a block: so many that the maxima of a row are few, and so few that a block with a
// likely token holds not many others.
constexpr size_t kBlock = 64;
constexpr size_t kLanes = 16;
// A full weight is 2^40. exp(-28.5) is below 2^-41, so that what is less likely weighs nothing.
constexpr double kFullWeight = 1099511627776.0;
constexpr double kWeightless = -28.5;
constexpr size_t kSorted = 64;  // so many weights are sorted rather than halved again

// Writes the largest value of each block and returns the largest of all, or NaN where there is any.
template <class Value>
Value block_maxima(std::span<const Value> row, std::vector<Value>& maxima) {
  maxima.clear();
  Value best = -std::numeric_limits<Value>::infinity();
  bool has_nan = false;
  size_t at = 0;
  for (; at + kBlock <= row.size(); at += kBlock) {
    Value lanes[kLanes];
    bool is_nan[kLanes] = {};
    std::copy_n(row.data() + at, kLanes, lanes);
    for (size_t first = 0; first < kBlock; first += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const Value value = row[at + first + lane];
        lanes[lane] = value > lanes[lane] ? value : lanes[lane];
        is_nan[lane] |= value != value;
      }
    }
    Value largest = lanes[0];
    for (size_t lane = 0; lane < kLanes; ++lane) {
      largest = lanes[lane] > largest ? lanes[lane] : largest;
      has_nan |= is_nan[lane];
    }
    maxima.push_back(largest);
  }
  if (at < row.size()) {
    Value largest = row[at];
    for (; at < row.size(); ++at) {
      largest = row[at] > largest ? row[at] : largest;
      has_nan |= row[at] != row[at];
    }
    maxima.push_back(largest);
  }
  for (const Value value : maxima) best = value > best ? value : best;
  return has_nan ? std::numeric_limits<Value>::quiet_NaN() : best;
}

template <class Value>
int64_t first_equal(std::span<const Value> row, const std::vector<Value>& maxima, Value best) {
  const size_t block =
      static_cast<size_t>(std::find(maxima.begin(), maxima.end(), best) - maxima.begin());
  return std::find(row.begin() + static_cast<ptrdiff_t>(block * kBlock), row.end(), best) -
         row.begin();
}

// Reorders `values` and returns the k-th largest of them, k >= 1.
template <class Value>
Value kth_largest(std::vector<Value>& values, size_t k) {
  const auto place = values.begin() + static_cast<ptrdiff_t>(k - 1);
  std::nth_element(values.begin(), place, values.end(), std::greater<>());
  return *place;
}

// Returns the smallest of the fewest and largest `weights` that sum to `target` or more, and
// reorders them.
int64_t threshold_of(std::vector<int64_t>& weights, int64_t target) {
  size_t begin = 0, end = weights.size();
  int64_t sum = 0;  // of those before `begin`, which are the largest
  const auto at = [&](size_t place) { return weights.begin() + static_cast<ptrdiff_t>(place); };
  while (end - begin > kSorted) {
    const size_t middle = begin + (end - begin) / 4;
    std::nth_element(at(begin), at(middle), at(end), std::greater<>());
    int64_t part = 0;
    for (size_t i = begin; i < middle; ++i) part += weights[i];
    if (sum + part >= target) {
      end = middle;
    } else {
      sum += part;
      begin = middle;
    }
  }
  std::sort(at(begin), at(end), std::greater<>());
  for (size_t i = begin; i < end; ++i) {
    sum += weights[i];
    if (sum >= target) return weights[i];
  }
  return 0;
}

// Removes tokens of less than top_p's share.
void keep_top_p(double top_p, DrawScratch& scratch) {
  scratch.weights.clear();
  int64_t total = 0;
  for (const auto& one : scratch.candidates) {
    scratch.weights.push_back(one.weight);
    total += one.weight;
  }
  const auto share = static_cast<int64_t>(std::ceil(static_cast<double>(total) * top_p));
  const int64_t threshold = threshold_of(scratch.weights, std::min(share, total));
  std::erase_if(scratch.candidates, [&](const auto& one) { return one.weight < threshold; });
}

template <class Value>
int64_t draw(std::span<const Value> row, const DrawForm& form, std::vector<Value>& maxima,
             DrawScratch& scratch) {
  const Value best = block_maxima(row, maxima);
  if (!std::isfinite(best)) return kNotFinite;
  if (form.temperature == 0.0) return first_equal(row, maxima, best);

  // The least value that may count. As many blocks as top_k have a value of at least the k-th
  // largest maximum, so that no value below it is among the top_k.
  double least = static_cast<double>(best) + kWeightless * form.temperature;
  const bool limits_number = form.top_k > 0 && static_cast<size_t>(form.top_k) < row.size();
  if (limits_number && static_cast<size_t>(form.top_k) <= maxima.size()) {
    std::vector<Value> copied = maxima;
    least =
        std::max(least, static_cast<double>(kth_largest(copied, static_cast<size_t>(form.top_k))));
  }
  scratch.candidates.clear();
  scratch.values.clear();
  for (size_t block = 0; block < maxima.size(); ++block) {
    if (static_cast<double>(maxima[block]) < least) continue;
    const size_t end = std::min(row.size(), (block + 1) * kBlock);
    for (size_t i = block * kBlock; i < end; ++i) {
      if (static_cast<double>(row[i]) < least) continue;
      scratch.candidates.push_back({static_cast<uint32_t>(i), 0});
      scratch.values.push_back(static_cast<double>(row[i]));
    }
  }
  double kth = -std::numeric_limits<double>::infinity();
  if (limits_number && static_cast<size_t>(form.top_k) < scratch.values.size()) {
    std::vector<double> copied = scratch.values;
    kth = kth_largest(copied, static_cast<size_t>(form.top_k));
  }
  for (size_t i = 0; i < scratch.candidates.size(); ++i) {
    if (scratch.values[i] < kth) continue;
    // Less the largest before the division, so that a tiny temperature overflows nothing.
    const double likelihood =
        std::exp((scratch.values[i] - static_cast<double>(best)) / form.temperature);
    if (form.min_p > 0.0 && likelihood < form.min_p) continue;
    scratch.candidates[i].weight = static_cast<int64_t>(std::nearbyint(likelihood * kFullWeight));
  }
  std::erase_if(scratch.candidates, [](const auto& one) { return one.weight == 0; });
  if (form.top_p < 1.0) keep_top_p(form.top_p, scratch);
  int64_t total = 0;
  for (const auto& one : scratch.candidates) total += one.weight;
  // The largest of `uniform` is 1 - 2^-53, so that the product stays below the sum.
  int64_t left = static_cast<int64_t>(static_cast<double>(total) * form.uniform);
  for (const auto& one : scratch.candidates) {
    if (left < one.weight) return one.token_id;
    left -= one.weight;
  }
  return scratch.candidates.back().token_id;
}

}  // namespace

int64_t draw_token(std::span<const float> logits, const DrawForm& form, DrawScratch& scratch) {
  return draw(logits, form, scratch.maxima_f32, scratch);
}

int64_t draw_token(std::span<const double> logits, const DrawForm& form, DrawScratch& scratch) {
  return draw(logits, form, scratch.maxima_f64, scratch);
}

}  // namespace dflash::compute
