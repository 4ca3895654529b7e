// Mode `auto`: into how many slices a chunk is cut at one worker, and how many travel at once, by
// what was measured there. These are pure functions of the curves; a choice changes speed, never a
// bit.
//
// Slices let sending, computing and receiving overlap; each of them costs another reading of the
// experts' weights. With n slices of cost s, c and r in the three stages and w of them under way,
// the slowest stage or the loop of credits sets the pace:
//     T(n, w) = s + c + r + (n - 1) * max(occupied(s), c, occupied(r), (s + c + r) / w)
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

#include "client/cost_curve.h"

namespace dflash::client {

// What a call asks of one worker.
struct Chunk {
  uint32_t num_tokens = 0;     // tokens of the whole call, because slices are cut by tokens
  uint32_t least_slices = 1;   // the least that slots and batch capacity allow
  double rows = 0, pairs = 0;  // rows and pairs at this worker
  double experts = 0;          // distinct experts
  double request_bytes = 0, reply_bytes = 0;
};

// What was learned about one worker; the model owns the curves.
struct Curves {
  const CostCurve& send;     // by bytes, from the start of encoding to the arrival at the worker
  const CostCurve& compute;  // by pairs and distinct experts
  const CostCurve& receive;  // by bytes, from the last kernel to the arrival at the host
};

// Why a choice was made, for explanations.
enum class ChoiceReason : uint8_t {
  kFixed,       // the mode says how many slices
  kUnmeasured,  // nothing is known yet, so the chunk stays whole
  kSmall,       // two slices of the least size would have more tokens
  kWhole,       // no cut is predicted to win by more than the hysteresis
  kSliced,      // slices are predicted to hide transfers
};

// A number of slices with its window, and the nanoseconds that are predicted for it.
struct SliceForecast {
  uint32_t num_slices = 0;
  uint32_t window = 0;
  double ns = 0;
  // The part of `ns` that no stage explains (WorkerModel); the same for every number of slices.
  double wait_ns = 0;
};

// What was chosen, why, and what else was considered.
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

// No slice has fewer tokens, nor, but for short chunks, fewer than kLeastOfLong.
inline constexpr uint32_t kLeastSliceTokens = 16, kLeastOfLong = 64;
// Another number of slices is taken only if it is predicted to need at most this share of the time.
inline constexpr double kHysteresis = 0.95;
// It must also save this much, because less is lost again in wake-ups of a busy machine.
inline constexpr double kLeastGainNs = 500'000;

// The expected number of distinct experts among `rows` rows with `pairs` pairs over `experts`
// experts: E * (1 - (1 - k/E)^m) with k = pairs / rows and m = rows.
double expected_experts(double experts, double rows, double pairs);

// The least number of tokens of a slice: 64, or a quarter of a chunk that is shorter than 256, so
// that over a slow link also the shortest prompts hide some of their transfer.
uint32_t least_slice_tokens(uint32_t num_tokens);

// The time of the chunk in `num_slices` slices, with the smallest window up to `max_window` whose
// credits come back early enough.
SliceForecast forecast(const Curves& curves, const Chunk& chunk, uint32_t num_slices,
                       uint32_t max_window);

// Chooses by the curves. `current` is the number of slices that such a chunk had last time, 0 if
// none.
SliceChoice choose_slices(const Curves& curves, const Chunk& chunk, uint32_t max_window,
                          uint32_t current);

}  // namespace dflash::client
