// What the cost model must learn, and what must not mislead it: seldom sizes beside many, disturbed
// samples, a machine that changes, a worker that makes its times up.
// SPDX-License-Identifier: Apache-2.0
#include "client/cost_curve.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>

namespace dflash::client {
namespace {

constexpr double kFixed = 20'000, kPerPair = 10'000, kPerExpert = 50'000;  // ns

double truth(double pairs, double experts) {
  return kFixed + kPerPair * pairs + kPerExpert * experts;
}

CostSample sample(double pairs, double experts, double factor = 1.0, int64_t at_ns = 0) {
  return {pairs, experts, truth(pairs, experts) * factor, at_ns};
}

double off(const CostCurve& curve, double pairs, double experts) {
  return std::abs(curve.predict(pairs, experts) / truth(pairs, experts) - 1);
}

TEST_CASE("a curve that saw decode steps and chunks predicts slices in between") {
  CostCurve curve;
  for (int i = 0; i < 10; ++i) {
    for (const double pairs : {4.0, 3400.0, 1700.0})
      curve.observe(sample(pairs, pairs < 16 ? 4 : 16));
  }
  for (const double pairs : {16.0, 100.0, 400.0, 850.0, 4000.0})
    CHECK(off(curve, pairs, 16) < 0.10);
}

TEST_CASE("one size of chunk is explained by its pairs, so that smaller slices are worth a trial") {
  CostCurve curve;
  curve.observe(sample(3400, 16));
  CHECK(curve.coefficients().fixed == 0);
  CHECK(curve.coefficients().per_expert == 0);
  CHECK(curve.predict(3400, 16) == doctest::Approx(truth(3400, 16)));
}

TEST_CASE("ten thousand decode steps do not push out what a few chunks taught") {
  CostCurve curve;
  for (int i = 0; i < 3; ++i) curve.observe(sample(3400, 16));
  for (int i = 0; i < 10'000; ++i) curve.observe(sample(4, 4));
  CHECK(off(curve, 3400, 16) < 0.05);
  CHECK(off(curve, 4, 4) < 0.05);
}

TEST_CASE(
    "every fourth sample disturbed by up to a factor of ten moves no prediction by more than a "
    "tenth") {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> disturbed(2.0, 10.0), quiet(0.98, 1.02);
  CostCurve curve;
  for (int i = 0; i < 64; ++i) {
    for (const double pairs : {50.0, 200.0, 800.0, 3200.0}) {
      curve.observe(sample(pairs, 16, i % 4 == 3 ? disturbed(random) : quiet(random)));
    }
  }
  for (const double pairs : {50.0, 200.0, 800.0, 3200.0}) CHECK(off(curve, pairs, 16) < 0.10);
}

TEST_CASE("a worker that becomes three times slower is predicted right after ten samples") {
  constexpr int64_t kPrefillNs = 40'000'000;  // from one chunk to the next
  CostCurve curve;
  for (int i = 0; i < 100; ++i) curve.observe(sample(3400, 16, 1.0, i * kPrefillNs));
  CHECK(off(curve, 3400, 16) < 0.02);
  for (int i = 0; i < 10; ++i) curve.observe(sample(3400, 16, 3.0, (100 + i) * kPrefillNs));
  CHECK(curve.predict(3400, 16) == doctest::Approx(3 * truth(3400, 16)).epsilon(0.05));
}

TEST_CASE("no coefficient is ever negative, whatever is observed") {
  std::mt19937_64 random(11);
  std::uniform_real_distribution<double> any(1.0, 1e9);
  CostCurve curve;
  for (int i = 0; i < 2'000; ++i) {
    curve.observe(
        {std::floor(any(random) / 1e5) + 1, std::floor(any(random) / 1e7), any(random), i});
    CHECK(curve.coefficients().fixed >= 0);
    CHECK(curve.coefficients().per_unit >= 0);
    CHECK(curve.coefficients().per_expert >= 0);
    CHECK(std::isfinite(curve.predict(1000, 16)));
  }
}

TEST_CASE("samples that are no measurement are ignored") {
  constexpr double kInf = std::numeric_limits<double>::infinity(),
                   kNan = std::numeric_limits<double>::quiet_NaN();
  CostCurve curve;
  for (const CostSample& bad : {
           CostSample{kNan,  1,    1,    0},
           CostSample{1,     kInf, 1,    0},
           CostSample{1,     1,    kInf, 0},
           CostSample{0,     1,    1,    0},
           CostSample{1,     -1,   1,    0},
           CostSample{1,     1,    0,    0},
           CostSample{1e300, 1,    1,    0}
  }) {
    curve.observe(bad);
  }
  CHECK(!curve.is_known());
  CHECK(curve.predict(100, 16) == 0);
}

}  // namespace
}  // namespace dflash::client
