// A cost that is learned from measurements: ns = fixed + per_unit * units + per_expert * experts,
// where no coefficient is below zero. A worker has one curve for its compute (units are pairs) and
// one for each direction of its link (units are bytes, without experts).
//
// Samples are kept by octave of their size, so that thousands of decode steps do not push out the
// few prefill slices. The fit minimises the sum of relative deviations, so that neither large
// samples nor a disturbed one rule it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

namespace dflash::client {

// One measured cost.
struct CostSample {
  double units = 0;    // > 0
  double experts = 0;  // >= 0
  double ns = 0;       // > 0
  int64_t at_ns = 0;   // when it was taken; newer samples weigh more
};

struct CostCoefficients {
  double fixed = 0, per_unit = 0, per_expert = 0;  // nanoseconds
};

// Not thread-safe: whoever has the turn (turn.h) observes and predicts.
class CostCurve {
 public:
  // Takes a sample. It fits the curve anew ever more seldom as an octave fills, and when
  // predictions have drifted by more than 20 %. Samples that are not finite or not positive are
  // ignored, because they come from a peer's clock.
  void observe(const CostSample& sample);

  bool is_known() const { return num_samples_ > 0; }
  double predict(double units, double experts) const {
    return coefficients_.fixed + coefficients_.per_unit * units +
           coefficients_.per_expert * experts;
  }
  const CostCoefficients& coefficients() const { return coefficients_; }
  // The smallest units seen so far; 0 before the first sample.
  double smallest_units() const { return smallest_units_; }
  // The mean of |predicted - measured| / measured over recent samples, each predicted before the
  // curve learned from it. One deviation counts as 1 at most, and the newest weighs 1/8. A fit
  // sets a mean above 20 % to 10 %, so that the new curve is judged by samples of its own.
  double residual() const { return residual_; }
  uint64_t num_samples() const { return num_samples_; }

 private:
  static constexpr int kOctaves = 40;
  static constexpr uint32_t kSamplesPerOctave = 8;
  struct Octave {
    std::array<CostSample, kSamplesPerOctave> samples;
    uint32_t num_taken = 0;
  };

  bool must_refit(const Octave& octave, int64_t now) const;
  void refit(int64_t now);

  std::array<Octave, kOctaves> octaves_{};
  CostCoefficients coefficients_;
  double smallest_units_ = 0;
  double residual_ = 0;
  uint64_t num_samples_ = 0;
  uint64_t num_at_last_fit_ = 0;
  int64_t last_fit_ns_ = 0;
};

}  // namespace dflash::client
