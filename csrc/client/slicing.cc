// Forecasts a pipeline of three stages and compares a few numbers of slices, doubling from the
// least.
// SPDX-License-Identifier: Apache-2.0
#include "client/slicing.h"

#include <algorithm>
#include <cmath>

namespace dflash::client {
namespace {

constexpr uint32_t kFactors[SliceChoice::kCandidates] = {1, 2, 4, 8, 16};
// A window is wide enough where credits come back in at most this share of the time that the
// slowest stage gives them. A credit that is late by a wake-up, or by another call's turn at the
// host, then leaves no stage without work, which costs more than the slots of a wider window.
constexpr double kCreditShare = 0.75;

struct StageTimes {
  double send, compute, receive;           // the latency of one slice in each stage
  double send_occupied, receive_occupied;  // for how long it keeps its direction of the link busy
};

StageTimes stages(const Curves& curves, const Chunk& chunk, uint32_t num_slices) {
  const double share = 1.0 / num_slices;
  const double experts =
      num_slices == 1 ? chunk.experts
                      : expected_experts(chunk.experts, chunk.rows * share, chunk.pairs * share);
  StageTimes t;
  t.send = curves.send.predict(chunk.request_bytes * share, 0);
  t.compute = curves.compute.predict(chunk.pairs * share, experts);
  t.receive = curves.receive.predict(chunk.reply_bytes * share, 0);
  t.send_occupied = curves.send.coefficients().per_unit * chunk.request_bytes * share;
  t.receive_occupied = curves.receive.coefficients().per_unit * chunk.reply_bytes * share;
  return t;
}

}  // namespace

double expected_experts(double experts, double rows, double pairs) {
  if (!(experts > 0) || !(rows > 0)) return 0;
  const double share = std::min(1.0, pairs / rows / experts);
  return experts * (1.0 - std::pow(1.0 - share, rows));
}

uint32_t least_slice_tokens(uint32_t num_tokens) {
  return std::clamp(num_tokens / 4, kLeastSliceTokens, kLeastOfLong);
}

void SliceChoice::add_wait(double wait_ns) {
  const auto add = [wait_ns](SliceForecast& one) {
    one.ns += wait_ns;
    one.wait_ns += wait_ns;
  };
  add(taken);
  for (int i = 0; i < num_considered; ++i) add(considered[static_cast<size_t>(i)]);
}

SliceForecast forecast(const Curves& curves, const Chunk& chunk, uint32_t num_slices,
                       uint32_t max_window) {
  const StageTimes t = stages(curves, chunk, num_slices);
  const double one = t.send + t.compute + t.receive;
  const double slowest = std::max({t.send_occupied, t.compute, t.receive_occupied});
  uint32_t window = std::min(2u, max_window);
  while (window < std::min(max_window, num_slices) && one / window > kCreditShare * slowest)
    ++window;
  return {num_slices, window, one + (num_slices - 1) * std::max(slowest, one / window)};
}

SliceChoice choose_slices(const Curves& curves, const Chunk& chunk, uint32_t max_window,
                          uint32_t current) {
  SliceChoice choice;
  choice.taken = forecast(curves, chunk, chunk.least_slices, max_window);
  if (!curves.compute.is_known() || !curves.send.is_known() || !curves.receive.is_known())
    return choice;
  const StageTimes whole = stages(curves, chunk, 1);
  choice.send_ns = whole.send;
  choice.compute_ns = whole.compute;
  choice.receive_ns = whole.receive;
  choice.reason = ChoiceReason::kSmall;
  const uint32_t least_tokens = least_slice_tokens(chunk.num_tokens);
  if (chunk.num_tokens < 2 * least_tokens) return choice;
  choice.reason = ChoiceReason::kWhole;
  SliceForecast best = choice.taken;
  SliceForecast kept = choice.taken;  // it is taken unless something else is clearly better
  for (const uint32_t factor : kFactors) {
    const uint32_t num_slices = chunk.least_slices * factor;
    if (factor > 1 && chunk.num_tokens / num_slices < least_tokens) break;
    // A curve is believed down to half of the smallest slice ever seen. The next choice then knows
    // more.
    if (factor > 1 && chunk.pairs / num_slices < curves.compute.smallest_units() / 2) break;
    const SliceForecast one = forecast(curves, chunk, num_slices, max_window);
    choice.considered[static_cast<size_t>(choice.num_considered++)] = one;
    if (one.ns < best.ns) best = one;
    if (num_slices == current) kept = one;
  }
  const bool is_worth_it = best.ns < kept.ns * kHysteresis && best.ns < kept.ns - kLeastGainNs;
  choice.taken = is_worth_it ? best : kept;
  if (choice.taken.num_slices > chunk.least_slices) choice.reason = ChoiceReason::kSliced;
  return choice;
}

}  // namespace dflash::client
