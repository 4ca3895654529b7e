// One pass over a row finds the largest value of each block. Most blocks have no token that weighs
// anything and are not looked at again.
// SPDX-License-Identifier: Apache-2.0
#include "compute/operators/draw.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

namespace dflash::compute {
namespace {

// Values of a block: so many that finding the largest of its lanes counts for little, and so few
// that a block with a likely token holds not many others.
constexpr size_t kBlock = 32;
// A full weight is 2^40. exp(-28.5) is below 2^-41, so that what is less likely weighs nothing.
constexpr double kFullWeight = 1099511627776.0;
constexpr double kWeightless = -28.5;
constexpr double kLeastExponent = -100.0;  // of an exponential that is computed
constexpr size_t kSorted = 64;             // so many weights are sorted rather than divided again

// Lanes of 16 bytes, which every processor has.
constexpr size_t kLaneBytes = 16;
template <class Value>
struct LanesOf {
  typedef Value type __attribute__((vector_size(kLaneBytes)));
};
template <class Value>
using Lanes = typename LanesOf<Value>::type;
template <class Value>
using LaneMask = decltype(Lanes<Value>{} != Lanes<Value>{});

template <class Value>
Lanes<Value> load_lanes(const Value* values) {
  Lanes<Value> lanes;
  std::memcpy(&lanes, values, kLaneBytes);
  return lanes;
}

// Returns the largest value of a full block. NaN is none, and sets lanes of `is_nan`.
template <class Value>
Value largest_of_block(const Value* values, LaneMask<Value>& is_nan) {
  constexpr size_t kNumLanes = kLaneBytes / sizeof(Value);
  Lanes<Value> first = Lanes<Value>{} - std::numeric_limits<Value>::infinity(), second = first;
  LaneMask<Value> nan = is_nan;
  for (size_t i = 0; i < kBlock; i += 2 * kNumLanes) {
    const Lanes<Value> a = load_lanes(values + i), b = load_lanes(values + i + kNumLanes);
    nan |= (a != a) | (b != b);
    first = a > first ? a : first;
    second = b > second ? b : second;
  }
  is_nan = nan;
  first = first > second ? first : second;
  Value largest = first[0];
  for (size_t lane = 1; lane < kNumLanes; ++lane)
    largest = first[lane] > largest ? first[lane] : largest;
  return largest;
}

// Writes the largest value of each block and returns the largest of all, or NaN where there is any.
template <class Value>
double block_maxima(std::span<const Value> row, std::vector<double>& maxima) {
  maxima.clear();
  LaneMask<Value> is_nan = {};
  size_t at = 0;
  for (; at + kBlock <= row.size(); at += kBlock)
    maxima.push_back(static_cast<double>(largest_of_block(row.data() + at, is_nan)));
  if (at < row.size()) {
    Value rest[kBlock];
    std::fill(std::begin(rest), std::end(rest), row[at]);
    std::copy(row.begin() + static_cast<ptrdiff_t>(at), row.end(), rest);
    maxima.push_back(static_cast<double>(largest_of_block(rest, is_nan)));
  }
  for (size_t lane = 0; lane < kLaneBytes / sizeof(Value); ++lane)
    if (is_nan[lane] != 0) return std::numeric_limits<double>::quiet_NaN();
  return *std::max_element(maxima.begin(), maxima.end());
}

using Doubles = Lanes<double>;
using Integers = LaneMask<double>;
constexpr size_t kDoubles = kLaneBytes / sizeof(double);
// So many lanes are weighed side by side, so that their chains of dependent operations hide each
// other's latency.
constexpr size_t kChains = 4;
// Adding this rounds a number below 2^51 to a whole one, which is then in the lowest bits.
constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52

// 1 / term! of the terms of Taylor's polynomial.
constexpr size_t kTerms = 13;
constexpr std::array<double, kTerms + 1> kTaylor = [] {
  std::array<double, kTerms + 1> found{};
  double factorial = 1.0;
  for (size_t term = 0; term <= kTerms; ++term) {
    found[term] = 1.0 / factorial;
    factorial *= static_cast<double>(term + 1);
  }
  return found;
}();

// Replaces each kLeastExponent <= x <= 0 by exp(x) within 2 units in the last place, by the same
// operations on every processor: 2^n * exp(r) with |r| <= ln(2) / 2, where the first term that
// Taylor's polynomial leaves out is below 2^-57.
void exp_of(Doubles (&x)[kChains]) {
  constexpr double kLog2E = 1.4426950408889634;
  // ln(2) in two parts, of which the first has so many zeros behind it that n times it is exact.
  constexpr double kLn2High = 0.693147180369123816490, kLn2Low = 1.90821492927058770002e-10;
  Doubles rounded[kChains], r[kChains], sum[kChains];
  for (size_t i = 0; i < kChains; ++i) {
    rounded[i] = x[i] * kLog2E + kRound;
    const Doubles n = rounded[i] - kRound;
    r[i] = (x[i] - n * kLn2High) - n * kLn2Low;
    sum[i] = Doubles{} + kTaylor[kTerms];
  }
#pragma GCC unroll 13
  for (size_t term = kTerms; term > 0; --term) {
    for (size_t i = 0; i < kChains; ++i) sum[i] = sum[i] * r[i] + kTaylor[term - 1];
  }
  for (size_t i = 0; i < kChains; ++i) {
    const auto power = (reinterpret_cast<Integers>(rounded[i]) << 52) + (int64_t{1023} << 52);
    x[i] = sum[i] * reinterpret_cast<Doubles>(power);
  }
}

// What a token's weight depends on beside its logit.
struct Weighing {
  double best, temperature;
  double least;         // a smaller logit weighs nothing
  double least_likely;  // nor does a smaller likelihood
};

// Writes the weights of a block and returns their sum.
template <class Value>
int64_t weigh_block(const Value* logits, const Weighing& how, int64_t* weights) {
  Integers sum = {};
  for (size_t at = 0; at < kBlock; at += kChains * kDoubles) {
    Doubles logit[kChains], x[kChains];
    for (size_t i = 0; i < kChains; ++i) {
      double wide[kDoubles];
      for (size_t lane = 0; lane < kDoubles; ++lane)
        wide[lane] = static_cast<double>(logits[at + i * kDoubles + lane]);
      logit[i] = load_lanes(wide);
      // Less the largest before the division, so that a tiny temperature overflows nothing.
      x[i] = (logit[i] - how.best) / how.temperature;
      x[i] = x[i] > kLeastExponent ? x[i] : Doubles{} + kLeastExponent;
    }
    exp_of(x);
    for (size_t i = 0; i < kChains; ++i) {
      const Integers counts = (logit[i] >= how.least) & (x[i] >= how.least_likely);
      const Integers weight = (reinterpret_cast<Integers>(x[i] * kFullWeight + kRound) -
                               std::bit_cast<int64_t>(kRound)) &
                              counts;
      std::memcpy(weights + at + i * kDoubles, &weight, kLaneBytes);
      sum += weight;
    }
  }
  int64_t total = 0;
  for (size_t lane = 0; lane < kDoubles; ++lane) total += sum[lane];
  return total;
}

// Weighs the blocks of a row that have a token which may count, and returns the sum.
template <class Value>
int64_t weigh(std::span<const Value> row, const Weighing& how, DrawScratch& scratch) {
  scratch.blocks.clear();
  for (size_t block = 0; block < scratch.maxima.size(); ++block)
    if (scratch.maxima[block] >= how.least) scratch.blocks.push_back(static_cast<uint32_t>(block));
  if (scratch.weights.size() < scratch.blocks.size() * kBlock)
    scratch.weights.resize(scratch.maxima.size() * kBlock);
  int64_t total = 0;
  int64_t* weights = scratch.weights.data();
  for (const uint32_t block : scratch.blocks) {
    const size_t at = block * kBlock;
    if (at + kBlock <= row.size()) {
      total += weigh_block(row.data() + at, how, weights);
    } else {
      Value rest[kBlock];
      std::fill(std::begin(rest), std::end(rest), -std::numeric_limits<Value>::infinity());
      std::copy(row.begin() + static_cast<ptrdiff_t>(at), row.end(), rest);
      total += weigh_block(rest, how, weights);
    }
    weights += kBlock;
  }
  return total;
}

// Reorders `values` and returns the k-th largest of them, k >= 1.
double kth_largest(std::vector<double>& values, size_t k) {
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

// Returns the weight of the least likely of the fewest tokens that have a share of `top_p`.
int64_t top_p_threshold(double top_p, int64_t total, std::span<const int64_t> weights,
                        std::vector<int64_t>& sorted) {
  const auto share = static_cast<int64_t>(std::ceil(static_cast<double>(total) * top_p));
  const int64_t target = std::min(share, total);
  // All that is left out sums to total - target at most, so that the others reach the target.
  const int64_t small = (total - target) / static_cast<int64_t>(weights.size());
  sorted.resize(weights.size());
  size_t count = 0;
  for (const int64_t weight : weights) {
    sorted[count] = weight;
    count += weight > small ? 1 : 0;
  }
  sorted.resize(count);
  return threshold_of(sorted, target);
}

// Returns the k-th largest logit of a row.
template <class Value>
double kth_logit(std::span<const Value> row, size_t k, DrawScratch& scratch) {
  double least = -std::numeric_limits<double>::infinity();
  if (k <= scratch.maxima.size()) {
    // So many blocks have a value of at least the k-th largest maximum.
    scratch.values = scratch.maxima;
    least = kth_largest(scratch.values, k);
  }
  scratch.values.clear();
  for (size_t block = 0; block < scratch.maxima.size(); ++block) {
    if (scratch.maxima[block] < least) continue;
    const size_t end = std::min(row.size(), (block + 1) * kBlock);
    for (size_t i = block * kBlock; i < end; ++i) {
      const auto logit = static_cast<double>(row[i]);
      if (logit >= least) scratch.values.push_back(logit);
    }
  }
  return kth_largest(scratch.values, k);
}

// Returns the first id of the largest logit.
template <class Value>
int64_t first_of(double best, std::span<const Value> row, std::span<const double> maxima) {
  const auto block =
      static_cast<size_t>(std::find(maxima.begin(), maxima.end(), best) - maxima.begin());
  size_t at = block * kBlock;
  while (static_cast<double>(row[at]) != best) ++at;
  return static_cast<int64_t>(at);
}

template <class Value>
int64_t draw(std::span<const Value> row, const DrawForm& form, DrawScratch& scratch) {
  const double best = block_maxima(row, scratch.maxima);
  if (!std::isfinite(best)) return kNotFinite;
  if (form.temperature == 0.0) return first_of<Value>(best, row, scratch.maxima);
  Weighing how = {best, form.temperature, best + kWeightless * form.temperature, form.min_p};
  if (form.top_k > 0 && static_cast<size_t>(form.top_k) < row.size())
    how.least = std::max(how.least, kth_logit(row, static_cast<size_t>(form.top_k), scratch));
  int64_t total = weigh(row, how, scratch);
  const std::span<const int64_t> weights(scratch.weights.data(), scratch.blocks.size() * kBlock);
  int64_t threshold = 0;
  if (form.top_p < 1.0) {
    threshold = top_p_threshold(form.top_p, total, weights, scratch.sorted);
    total = 0;
    for (const int64_t weight : weights) total += weight >= threshold ? weight : 0;
  }
  // The largest of `uniform` is 1 - 2^-53, so that the product stays below the sum, and the token
  // is found.
  int64_t left = static_cast<int64_t>(static_cast<double>(total) * form.uniform);
  for (size_t i = 0; i < weights.size(); ++i) {
    left -= weights[i] >= threshold ? weights[i] : 0;
    if (left < 0) return static_cast<int64_t>(scratch.blocks[i / kBlock] * kBlock + i % kBlock);
  }
  return kNotFinite;
}

}  // namespace

int64_t draw_token(std::span<const float> logits, const DrawForm& form, DrawScratch& scratch) {
  return draw(logits, form, scratch);
}

int64_t draw_token(std::span<const double> logits, const DrawForm& form, DrawScratch& scratch) {
  return draw(logits, form, scratch);
}

}  // namespace dflash::compute
