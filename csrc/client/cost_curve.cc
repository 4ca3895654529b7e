// Fitting of cost curves. A fit tries all sets of coefficients and takes the sum of absolute
// relative deviations as its loss, which reweighted least squares minimise.
// SPDX-License-Identifier: Apache-2.0
#include "client/cost_curve.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <span>

namespace dflash::client {
namespace {

constexpr double kMaxResidual = 0.20;        // a larger drift makes the curve be fitted anew
constexpr double kResidualMemory = 1.0 / 8;  // the weight of the newest deviation in the mean
constexpr uint64_t kLeastNewSamples = 4;     // between two fits: one disturbed sample is no drift
// The least time between two fits for drift. A fit passes over all samples up to 42 times, which is
// too much for every call of a decode step.
constexpr int64_t kLeastRefitNs = 20'000'000;
constexpr double kHalfWeightAgeNs = 30e9;  // a sample of this age weighs half
// Smaller deviations are noise of timers. This also bounds how far samples are weighted up.
constexpr double kLeastDeviation = 0.03;
constexpr int kReweightings = 6;    // enough for the weights to settle within a percent
constexpr size_t kMaxPoints = 320;  // the number of samples when all octaves are full

struct Point {
  // 1, units and experts, each divided by ns: the target is then 1 and deviations are relative.
  double features[3];
  double weight;
};

using Vector = std::array<double, 3>;

// Solves least squares over the features of `mask` by Gaussian elimination. Returns nothing where
// the features are not independent in these points or a coefficient comes out negative.
std::optional<Vector> solve(std::span<const Point> points, unsigned mask) {
  int used[3];
  int n = 0;
  for (int f = 0; f < 3; ++f) {
    if (mask >> f & 1) used[n++] = f;
  }
  double m[3][4] = {};
  for (const Point& point : points) {
    for (int i = 0; i < n; ++i) {
      const double wx = point.weight * point.features[used[i]];
      for (int j = 0; j < n; ++j) m[i][j] += wx * point.features[used[j]];
      m[i][3] += wx;
    }
  }
  double scale[3];
  for (int i = 0; i < n; ++i) {
    if (!(m[i][i] > 0)) return std::nullopt;
    scale[i] = 1 / std::sqrt(m[i][i]);
  }
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) m[i][j] *= scale[i] * scale[j];
    m[i][3] *= scale[i];
  }
  // Pivots are those of a matrix with a unit diagonal. Features that differ by less than a percent
  // count as one feature.
  constexpr double kLeastPivot = 1e-4;
  for (int i = 0; i < n; ++i) {
    if (!(m[i][i] > kLeastPivot)) return std::nullopt;
    for (int k = i + 1; k < n; ++k) {
      const double factor = m[k][i] / m[i][i];
      for (int j = i; j < n; ++j) m[k][j] -= factor * m[i][j];
      m[k][3] -= factor * m[i][3];
    }
  }
  Vector result{};
  double scaled[3];
  for (int i = n - 1; i >= 0; --i) {
    scaled[i] = m[i][3];
    for (int j = i + 1; j < n; ++j) scaled[i] -= m[i][j] * scaled[j];
    scaled[i] /= m[i][i];
    result[static_cast<size_t>(used[i])] = scaled[i] * scale[i];
    if (!(scaled[i] >= 0)) return std::nullopt;
  }
  return result;
}

double deviation(const Point& point, const Vector& c) {
  return std::abs(point.features[0] * c[0] + point.features[1] * c[1] + point.features[2] * c[2] -
                  1.0);
}

struct Fit {
  Vector coefficients;
  double loss;
};

// Fits the features of `mask` so that the sum of absolute deviations is least, by solving
// reweighted least squares.
std::optional<Fit> fit_features(std::span<Point> points, std::span<const double> age_weights,
                                unsigned mask) {
  for (size_t i = 0; i < points.size(); ++i) points[i].weight = age_weights[i];
  std::optional<Vector> found;
  for (int round = 0; round < kReweightings; ++round) {
    found = solve(points, mask);
    if (!found) return std::nullopt;
    for (size_t i = 0; i < points.size(); ++i) {
      points[i].weight = age_weights[i] / std::max(deviation(points[i], *found), kLeastDeviation);
    }
  }
  double loss = 0;
  for (size_t i = 0; i < points.size(); ++i) loss += age_weights[i] * deviation(points[i], *found);
  return Fit{*found, loss};
}

}  // namespace

void CostCurve::observe(const CostSample& sample) {
  const bool is_sane = std::isfinite(sample.units) && std::isfinite(sample.experts) &&
                       std::isfinite(sample.ns) && sample.units >= 1 && sample.experts >= 0 &&
                       sample.ns > 0 && sample.units < 0x1p39;
  if (!is_sane) return;
  if (num_samples_ > 0) {
    const double now_off = std::abs(predict(sample.units, sample.experts) - sample.ns) / sample.ns;
    residual_ += (std::min(now_off, 1.0) - residual_) * kResidualMemory;
  }
  Octave& octave =
      octaves_[static_cast<size_t>(std::bit_width(static_cast<uint64_t>(sample.units)))];
  octave.samples[octave.num_taken++ % kSamplesPerOctave] = sample;
  smallest_units_ = num_samples_ == 0 ? sample.units : std::min(smallest_units_, sample.units);
  ++num_samples_;
  if (must_refit(octave, sample.at_ns)) refit(sample.at_ns);
}

// A fit is due at the 1st, 2nd, 4th, 8th ... sample of an octave, and on drift.
bool CostCurve::must_refit(const Octave& octave, int64_t now) const {
  if (std::has_single_bit(octave.num_taken)) return true;
  return residual_ > kMaxResidual && num_samples_ - num_at_last_fit_ >= kLeastNewSamples &&
         now - last_fit_ns_ >= kLeastRefitNs;
}

void CostCurve::refit(int64_t now) {
  num_at_last_fit_ = num_samples_;
  last_fit_ns_ = now;
  std::array<Point, kMaxPoints> points;
  std::array<double, kMaxPoints> age_weights;
  size_t count = 0;
  for (const Octave& octave : octaves_) {
    const uint32_t kept = std::min(octave.num_taken, kSamplesPerOctave);
    for (uint32_t i = 0; i < kept; ++i) {
      const CostSample& s = octave.samples[i];
      points[count] = {
          {1 / s.ns, s.units / s.ns, s.experts / s.ns},
          1.0
      };
      // An octave counts once, however many samples it has.
      age_weights[count] =
          1.0 / kept / (1.0 + std::max(0.0, static_cast<double>(now - s.at_ns)) / kHalfWeightAgeNs);
      ++count;
    }
  }
  // Fewer coefficients are preferred where they explain the samples as well. Among equals, the fit
  // that makes slices look cheap comes first: a slice that was tried corrects the curve, one that
  // was never tried does not.
  constexpr unsigned kMasks[] = {0b010, 0b110, 0b011, 0b111, 0b100, 0b001, 0b101};
  // A better fit must lower the loss to this share, and by this much, which timers cannot tell
  // apart.
  constexpr double kBetter = 0.97, kLeastGain = 0.002;
  std::optional<Fit> best;
  for (const unsigned mask : kMasks) {
    const auto fit = fit_features({points.data(), count}, {age_weights.data(), count}, mask);
    if (fit && (!best || fit->loss < best->loss * kBetter - kLeastGain)) best = fit;
  }
  if (!best) return;
  coefficients_ = {best->coefficients[0], best->coefficients[1], best->coefficients[2]};
  // The new fit gets samples of its own before it is judged.
  if (residual_ > kMaxResidual) residual_ = kMaxResidual / 2;
}

}  // namespace dflash::client
