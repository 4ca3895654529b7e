// The activation formulas against the C library in long double, and their limits; the reference's
// scalar type computes.
// SPDX-License-Identifier: Apache-2.0
#include "compute/experts/activation.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "compute/vector_scalar.h"
#include "failed.h"

namespace dflash::compute {
namespace {

using V = ScalarVector;
constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

// Distance in units of the last place of the exact value (of the smallest normal's below that).
double ulps(float found, long double exact) {
  const int exponent = std::max(std::ilogb(static_cast<double>(exact)), -126);
  return static_cast<double>(std::fabs(static_cast<long double>(found) - exact) /
                             std::ldexp(1.0L, exponent - 23));
}

template <class Found, class Exact>
double worst_ulps(float from, float to, Found found, Exact exact) {
  double worst = 0;
  const int steps = 200'000;
  for (int i = 0; i <= steps; ++i) {
    const float x = from + (to - from) * static_cast<float>(i) / static_cast<float>(steps);
    worst = std::max(worst, ulps(found(x), exact(static_cast<long double>(x))));
  }
  return worst;
}

TEST_CASE("exp is within 1.2 ulp, subnormal results included") {
  const auto exact = [](long double x) { return std::exp(x); };
  CHECK(worst_ulps(-87.0f, 88.7f, exp<V>, exact) < 1.2);
  CHECK(worst_ulps(-1.0f, 1.0f, exp<V>, exact) < 1.2);
  CHECK(worst_ulps(-103.9f, -87.0f, exp<V>, exact) < 1.2);
}

TEST_CASE("exp has the right limits") {
  CHECK(exp<V>(0.0f) == 1.0f);
  CHECK(exp<V>(-0.0f) == 1.0f);
  CHECK(exp<V>(88.8f) == kInf);
  CHECK(exp<V>(1e30f) == kInf);
  CHECK(exp<V>(kInf) == kInf);
  CHECK(exp<V>(-104.0f) == 0.0f);
  CHECK(exp<V>(-kInf) == 0.0f);
  CHECK(exp<V>(-103.0f) > 0.0f);  // a subnormal, not flushed
  CHECK(std::isnan(exp<V>(kNan)));
}

TEST_CASE("sigmoid is within 3 ulp and saturates") {
  CHECK(worst_ulps(-87.0f, 87.0f, sigmoid<V>,
                   [](long double x) { return 1.0L / (1.0L + std::exp(-x)); }) < 3);
  CHECK(sigmoid<V>(kInf) == 1.0f);
  CHECK(sigmoid<V>(-kInf) == 0.0f);
  CHECK(std::isnan(sigmoid<V>(kNan)));
}

TEST_CASE("1 + erf is within 2 ulp right of zero and does not cancel in the left tail") {
  const auto exact = [](long double x) { return std::erfc(-x); };
  CHECK(worst_ulps(-0.9f, 4.0f, one_plus_erf<V>, exact) < 8);
  CHECK(worst_ulps(0.0f, 4.0f, one_plus_erf<V>, exact) < 2);
  double worst = 0;
  for (int i = 0; i <= 100'000; ++i) {
    const float x = -3.0f - static_cast<float>(i) * 1e-4f;
    worst = std::max(worst, std::fabs(static_cast<double>(one_plus_erf<V>(x)) -
                                      std::erfc(-static_cast<double>(x))));
  }
  CHECK(worst < std::ldexp(1.0, -29));  // 1 + erff(x) would err by half of 2^-24 here
  CHECK(one_plus_erf<V>(kInf) == 2.0f);
  CHECK(one_plus_erf<V>(-kInf) == 0.0f);
  CHECK(one_plus_erf<V>(1e30f) == 2.0f);
  CHECK(one_plus_erf<V>(-1e30f) == 0.0f);
  CHECK(one_plus_erf<V>(0.0f) == 1.0f);
  CHECK(std::isnan(one_plus_erf<V>(kNan)));
}

double worst_error(Activation activation, long double (*exact)(long double)) {
  double worst = 0;
  for (int i = -40'000; i <= 40'000; ++i) {
    const float x = static_cast<float>(i) * 5e-4f;
    const long double error = std::fabs(static_cast<long double>(activate<V>(activation, x)) -
                                        exact(static_cast<long double>(x)));
    worst = std::max(worst,
                     static_cast<double>(error) / std::max(1.0, static_cast<double>(std::fabs(x))));
  }
  return worst;
}

TEST_CASE("every activation is its textbook function within 4 units of 2^-24 of its argument") {
  const double bound = 4 * std::ldexp(1.0, -24);
  CHECK(worst_error(Activation::kSilu, [](long double x) { return x / (1.0L + std::exp(-x)); }) <
        bound);
  CHECK(worst_error(Activation::kGelu, [](long double x) {
          return 0.5L * x * std::erfc(-x * std::sqrt(0.5L));
        }) < bound);
  CHECK(worst_error(Activation::kGeluTanh, [](long double x) {
          return 0.5L * x *
                 (1.0L + std::tanh(std::sqrt(2.0L / 3.14159265358979323846L) *
                                   (x + 0.044715L * x * x * x)));
        }) < bound);
  CHECK(worst_error(Activation::kRelu, [](long double x) { return std::max(x, 0.0L); }) == 0.0);
  CHECK(worst_error(Activation::kIdentity, [](long double x) { return x; }) == 0.0);
  CHECK(worst_error(Activation::kSigmoid,
                    [](long double x) { return 1.0L / (1.0L + std::exp(-x)); }) < bound);
  CHECK(worst_error(Activation::kQuickGelu,
                    [](long double x) { return x / (1.0L + std::exp(-1.702L * x)); }) < bound);
  CHECK(activate<V>(Activation::kReluSquared, 3.0f) == 9.0f);
  CHECK(activate<V>(Activation::kReluSquared, -3.0f) == 0.0f);
  for (int activation = 0; activation <= 7; ++activation) {
    CHECK(std::isnan(activate<V>(static_cast<Activation>(activation), kNan)));
  }
}

TEST_CASE("clamps bound gate and up, and a NaN passes them") {
  FfnSpec spec;
  spec.activation = Activation::kIdentity;
  spec.gate_max = 7.0f;
  spec.up_limit = 2.0f;
  CHECK(gate<V>(spec, 100.0f, 100.0f) == 14.0f);
  CHECK(gate<V>(spec, -100.0f, -100.0f) == 200.0f);  // the gate has no lower bound
  CHECK(std::isnan(gate<V>(spec, kNan, 1.0f)));
  CHECK(std::isnan(gate<V>(spec, 1.0f, kNan)));
}

TEST_CASE("the clamped swiglu is (u + offset) g sigmoid(alpha g)") {
  FfnSpec spec;
  spec.gate = GateKind::kClampedSwiglu;
  spec.alpha = 1.702f;
  spec.up_offset = 1.0f;
  spec.gate_max = spec.up_limit = 7.0f;
  const double g = 1.25, u = -0.5;
  const double exact = (u + 1.0) * g / (1.0 + std::exp(-1.702 * g));
  CHECK(std::fabs(static_cast<double>(gate<V>(spec, 1.25f, -0.5f)) - exact) <
        4 * std::ldexp(exact, -23));
}

TEST_CASE("a spec outside its bounds is refused by field") {
  FfnSpec good;
  good.in_size = good.intermediate_size = good.out_size = 8;
  CHECK(good.validate().ok());
  const auto check_refused = [&](const char* field, auto change) {
    FfnSpec spec = good;
    change(spec);
    CHECK(spec.validate() == Failed(ErrorCode::kUnsupported, field));
  };
  check_refused("in_size", [](FfnSpec& s) { s.in_size = 0; });
  check_refused("intermediate_size", [](FfnSpec& s) { s.intermediate_size = (1u << 18) + 1; });
  check_refused("out_size", [](FfnSpec& s) { s.out_size = ~0u; });
  check_refused("activation", [](FfnSpec& s) { s.activation = static_cast<Activation>(8); });
  check_refused("gate", [](FfnSpec& s) { s.gate = static_cast<GateKind>(3); });
  check_refused("alpha", [](FfnSpec& s) { s.alpha = kInf; });
  check_refused("up_offset", [](FfnSpec& s) { s.up_offset = kNan; });
  check_refused("gate_max", [](FfnSpec& s) { s.gate_max = kNan; });
  check_refused("up_limit", [](FfnSpec& s) { s.up_limit = -1.0f; });
  check_refused("gate", [](FfnSpec& s) { s.gate = GateKind::kNone, s.up_limit = 1.0f; });
}

}  // namespace
}  // namespace dflash::compute
