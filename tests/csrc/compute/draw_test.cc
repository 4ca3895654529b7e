// A drawn token is that of a plain walk over all tokens with the same weights, in rows of one
// block, of several and of a part of one, and the most likely token is the first of the largest.
// SPDX-License-Identifier: Apache-2.0
#include "compute/operators/draw.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace dflash::compute {
namespace {

constexpr size_t kWidths[] = {1, 2, 31, 32, 33, 64, 257, 4099};

// Logits of which many are equal, and some weigh nothing.
std::vector<float> row_of(size_t width, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<float> row(width);
  for (float& logit : row) logit = static_cast<float>(generator() % 400) / 8.0f - 25.0f;
  return row;
}

// What a token weighs, by the library's exponential: within 1 of the core's.
double weight_of(double logit, double best, double temperature) {
  return std::nearbyint(std::exp(std::max((logit - best) / temperature, -100.0)) * 1099511627776.0);
}

TEST_CASE("at temperature 0 the first of the largest is taken") {
  DrawScratch scratch;
  const DrawForm greedy{.temperature = 0.0, .top_k = 2, .top_p = 0.5, .min_p = 0.5, .uniform = 0.9};
  for (const size_t width : kWidths) {
    for (uint32_t seed = 0; seed < 20; ++seed) {
      std::vector<float> row = row_of(width, seed);
      const auto expected = std::max_element(row.begin(), row.end()) - row.begin();
      CHECK(draw_token(std::span<const float>(row), greedy, scratch) == expected);
      row[seed % width] = std::numeric_limits<float>::quiet_NaN();
      CHECK(draw_token(std::span<const float>(row), greedy, scratch) == kNotFinite);
      row[seed % width] = std::numeric_limits<float>::infinity();
      CHECK(draw_token(std::span<const float>(row), greedy, scratch) == kNotFinite);
    }
  }
}

TEST_CASE("a random number points at the token where the sum of weights passes it") {
  DrawScratch scratch;
  for (const size_t width : kWidths) {
    for (uint32_t seed = 0; seed < 20; ++seed) {
      const std::vector<float> row = row_of(width, seed);
      const std::vector<double> wide(row.begin(), row.end());
      const double best = *std::max_element(wide.begin(), wide.end());
      for (const double temperature : {0.01, 0.7, 1.0, 20.0}) {
        double total = 0.0;
        for (const double logit : wide) total += weight_of(logit, best, temperature);
        const DrawForm form{.temperature = temperature, .uniform = (seed + 0.5) / 20.0};
        const int64_t token = draw_token(std::span<const float>(row), form, scratch);
        REQUIRE(token >= 0);
        REQUIRE(static_cast<size_t>(token) < width);
        CHECK(draw_token(std::span<const double>(wide), form, scratch) == token);
        double before = 0.0;
        for (int64_t i = 0; i < token; ++i)
          before += weight_of(wide[static_cast<size_t>(i)], best, temperature);
        const double after =
            before + weight_of(wide[static_cast<size_t>(token)], best, temperature);
        const auto slack = static_cast<double>(width);  // of weights that differ by 1
        CHECK(before <= form.uniform * total + slack);
        CHECK(form.uniform * total <= after + slack);
      }
    }
  }
}

TEST_CASE("filters keep the most likely tokens") {
  DrawScratch scratch;
  const std::vector<float> row = {0.0f, 3.0f, 1.0f, 3.0f, 2.0f};
  const auto tokens_of = [&](DrawForm form) {
    std::vector<int64_t> found;
    for (int place = 0; place < 100; ++place) {
      form.uniform = place / 100.0;
      found.push_back(draw_token(std::span<const float>(row), form, scratch));
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  };
  CHECK(tokens_of({}) == std::vector<int64_t>{0, 1, 2, 3, 4});
  CHECK(tokens_of({.top_k = 1}) == std::vector<int64_t>{1, 3});
  CHECK(tokens_of({.top_k = 3}) == std::vector<int64_t>{1, 3, 4});
  CHECK(tokens_of({.top_p = 0.5}) == std::vector<int64_t>{1, 3});
  CHECK(tokens_of({.min_p = 0.3}) == std::vector<int64_t>{1, 3, 4});
}

}  // namespace
}  // namespace dflash::compute
