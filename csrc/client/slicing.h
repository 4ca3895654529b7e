// Mode `auto`: how many slices a chunk is cut into at one worker, and how many travel at once, from
// what was measured there. Pure functions of the curves; a choice changes speed, never a bit.
//
// What slices buy is that sending, computing and receiving overlap; what they cost is that every
// slice reads the experts' weights again. With n slices of cost s, c, r and w of them under way,
// the slowest stage or the credit loop sets the pace:
//     T(n, w) = s + c + r + (n - 1) * max(occupied(s), c, occupied(r), (s + c + r) / w)
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

#include "client/cost_curve.h"

namespace dflash::client {

// What a call asks of one worker.
struct Chunk {
  uint32_t num_tokens = 0;     // of the whole call: slices are cut by tokens
  uint32_t least_slices = 1;   // that slots and batch capacity ask for
  double rows = 0, pairs = 0;  // at this worker
  double experts = 0;          // distinct ones
  double request_bytes = 0, reply_bytes = 0;
};

struct Curves {
  const CostCurve& send;     // by bytes, from the start of encoding to arrival
  const CostCurve& compute;  // by pairs and distinct experts
  const CostCurve& receive;  // by bytes, from the last kernel to arrival
};

enum class ChoiceReason : uint8_t {
  kFixed,       // the mode says how many
  kUnmeasured,  // nothing known yet: whole chunk
  kSmall,       // at most kLeastSliceTokens tokens: nothing to cut
  kWhole,       // no cut is predicted to win the hysteresis
  kSliced,      // slices hide transfer
};

struct SliceForecast {
  uint32_t num_slices = 0;
  uint32_t window = 0;
  double ns = 0;
  // The part of `ns` that no stage explains (WorkerModel); the same for every number of slices.
  double wait_ns = 0;
};

struct SliceChoice {
  static constexpr int kCandidates = 5;
  SliceForecast taken;
  ChoiceReason reason = ChoiceReason::kUnmeasured;
  std::array<SliceForecast, kCandidates> considered{};
  int num_considered = 0;
  double send_ns = 0, compute_ns = 0, receive_ns = 0;  // of the whole chunk in one piece

  // Adds waiting to every forecast, after the choice was made: it moves none.
  void add_wait(double wait_ns);
};

inline constexpr uint32_t kLeastSliceTokens = 64;
// what a change must be predicted to take at most, of the time without it
inline constexpr double kHysteresis = 0.95;
// and what it must save: less is lost again in wake-ups of a busy machine
inline constexpr double kLeastGainNs = 500'000;

// Distinct experts among `rows` rows with `pairs` pairs spread over `experts` experts: E * (1 - (1
// - k/E)^m).
double expected_experts(double experts, double rows, double pairs);

// Time of the chunk in `num_slices` slices, with the smallest window up to `max_window` that comes
// within 2 % of the best.
SliceForecast forecast(const Curves& curves, const Chunk& chunk, uint32_t num_slices,
                       uint32_t max_window);

// `current` is the number of slices taken for such a chunk last time; 0: none.
SliceChoice choose_slices(const Curves& curves, const Chunk& chunk, uint32_t max_window,
                          uint32_t current);

}  // namespace dflash::client
