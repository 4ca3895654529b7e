// Learns from the timestamps of replies. Readings of the worker's clock are checked against the
// host's before they are used.
// SPDX-License-Identifier: Apache-2.0
#include "client/worker_model.h"

#include <algorithm>
#include <bit>

namespace dflash::client {
namespace {

// The offset of clocks is measured anew in every epoch. Clocks drift by less than 1 ms in two
// epochs (at 50 ppm).
constexpr int64_t kEpochNs = 10'000'000'000;

// The median of what chunks waited is taken anew after so many of them, not after each, because it
// is taken while a call is being served.
constexpr uint32_t kPerMedian = 4;

// Differences of clock readings that a peer may have made up: defined for all values.
int64_t difference(int64_t later, int64_t earlier) {
  return static_cast<int64_t>(static_cast<uint64_t>(later) - static_cast<uint64_t>(earlier));
}

}  // namespace

SliceChoice WorkerModel::choose(uint32_t cost_class, const Chunk& chunk, uint32_t window,
                                bool is_fixed) {
  ChunkRecord& record = record_of(cost_class, chunk.num_tokens);
  const Curves curves{send_, compute_[cost_class], receive_};
  SliceChoice choice;
  if (is_fixed) {
    choice.taken = forecast(curves, chunk, chunk.least_slices, window);
    choice.reason = ChoiceReason::kFixed;
  } else {
    choice = choose_slices(curves, chunk, window, record.choice.taken.num_slices);
  }
  if (choice.taken.ns > 0) choice.add_wait(record.wait_ns);
  record.num_tokens = chunk.num_tokens;
  record.choice = choice;
  ++record.num_chunks;
  return choice;
}

void WorkerModel::observe(uint32_t cost_class, const SliceSize& size, const ReplyTimes& times) {
  const int64_t elapsed = difference(times.arrived_ns, times.published_ns);
  const int64_t at_worker = difference(times.worker_finished_ns, times.worker_received_ns);
  const int64_t compute = difference(times.worker_finished_ns, times.worker_started_ns);
  const int64_t behind = times.worker_behind_ns;
  const bool is_plausible = compute > 0 && at_worker >= compute && at_worker <= elapsed &&
                            behind >= 0 && behind <= at_worker - compute;
  if (!is_plausible) return;
  const int64_t now = times.arrived_ns;
  // It rises at once, so that a worker that others begin to use is not asked twice for it.
  behind_ns_ = std::max(behind, behind_ns(now) / kFadingOf * (kFadingOf - 1));
  compute_[cost_class].observe({static_cast<double>(size.pairs), static_cast<double>(size.experts),
                                static_cast<double>(compute), now});
  observe_clock(times);
  const int64_t link = elapsed - at_worker;
  const int64_t on_way = std::clamp<int64_t>(
      difference(times.worker_received_ns, times.published_ns) - clock_offset_ns(), 0, link);
  if (times.found_idle) {
    // Encoding here and checking there are needed for every byte sent, so they count as sending.
    // What the worker computed for other hosts first says nothing about either.
    const int64_t checking = at_worker - compute - behind;
    const double send = static_cast<double>(on_way + checking +
                                            difference(times.published_ns, times.encode_start_ns));
    send_.observe({static_cast<double>(size.request_bytes), 0, std::max(send, 1.0), now});
  }
  // The way back was free if the reply before this one had arrived before this one was ready.
  const int64_t finished_here = difference(times.worker_finished_ns, clock_offset_ns());
  if (finished_here >= last_arrived_ns_) {
    const double receive =
        static_cast<double>(std::max<int64_t>(difference(times.arrived_ns, finished_here), 1));
    receive_.observe({static_cast<double>(size.reply_bytes), 0,
                      std::min(receive, static_cast<double>(std::max<int64_t>(link, 1))), now});
  }
  last_arrived_ns_ = now;
}

void WorkerModel::record(uint32_t cost_class, uint32_t num_tokens, const SliceForecast& predicted,
                         double measured_ns) {
  ChunkRecord& record = record_of(cost_class, num_tokens);
  const uint32_t at = record.num_measured++ % ChunkRecord::kKept;
  record.predicted_ns[at] = predicted.ns;
  record.measured_ns[at] = measured_ns;
  record.waited_ns[at] = measured_ns - (predicted.ns - predicted.wait_ns);
  if (record.num_measured <= kPerMedian || record.num_measured % kPerMedian == 0) {
    std::array<double, ChunkRecord::kKept> waited = record.waited_ns;
    const auto end = waited.begin() + std::min(record.num_measured, ChunkRecord::kKept);
    const auto middle = waited.begin() + (end - waited.begin()) / 2;
    std::nth_element(waited.begin(), middle, end);
    record.wait_ns = std::max(*middle, 0.0);
  }
}

std::vector<ChunkRecord> WorkerModel::records() const {
  std::vector<ChunkRecord> all;
  for (const auto& [cost_class, octaves] : records_) {
    for (const ChunkRecord& record : octaves) {
      if (record.num_chunks == 0) continue;
      all.push_back(record);
      all.back().cost_class = cost_class;
    }
  }
  return all;
}

int64_t WorkerModel::clock_offset_ns() const {
  return best_now_.link_ns <= best_before_.link_ns ? best_now_.offset_ns : best_before_.offset_ns;
}

ChunkRecord& WorkerModel::record_of(uint32_t cost_class, uint32_t num_tokens) {
  return records_[cost_class][static_cast<size_t>(std::bit_width(num_tokens))];
}

void WorkerModel::observe_clock(const ReplyTimes& times) {
  if (times.arrived_ns - epoch_began_ns_ > kEpochNs) {
    best_before_ = best_now_;
    best_now_ = Offset();
    epoch_began_ns_ = times.arrived_ns;
  }
  const int64_t out = difference(times.worker_received_ns, times.published_ns);
  const int64_t back = difference(times.arrived_ns, times.worker_finished_ns);
  const int64_t link = difference(times.arrived_ns, times.published_ns) -
                       difference(times.worker_finished_ns, times.worker_received_ns);
  if (link > best_now_.link_ns) return;
  best_now_ = {link, difference(out, back) / 2};
}

WorkerForecast WorkerModel::report(const std::string& name) const {
  WorkerForecast found;
  found.name = name;
  found.send = send_.coefficients();
  found.receive = receive_.coefficients();
  found.send_residual = send_.residual();
  found.receive_residual = receive_.residual();
  for (const auto& [cost_class, curve] : compute_) {
    found.compute[cost_class] = curve.coefficients();
    found.compute_residual[cost_class] = curve.residual();
  }
  found.chunks = records();
  found.clock_offset_ns = clock_offset_ns();
  return found;
}

}  // namespace dflash::client
