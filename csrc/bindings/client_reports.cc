// Turns the client's plain reports into Python dictionaries, field by field.
// SPDX-License-Identifier: Apache-2.0
#include "bindings/client_box.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <string>

namespace py = pybind11;

namespace dflash::bindings {
namespace {

// How a worker stands, in one word.
const char* worker_state(const client::WorkerReport& report) {
  if (report.standing == client::Standing::kLost) return "lost";
  if (report.admission == client::Admission::kDraining) return "draining";
  if (report.path == client::PathState::kWorn) return "retired";
  return report.standing == client::Standing::kSuspect ? "suspect" : "ready";
}

py::dict coefficients_dict(const client::CostCoefficients& found, double residual,
                           const char* unit) {
  py::dict fields;
  fields["fixed_ns"] = found.fixed;
  fields[(std::string("ns_per_") + unit).c_str()] = found.per_unit;
  if (found.per_expert > 0) fields["ns_per_expert"] = found.per_expert;
  fields["residual"] = residual;
  return fields;
}

const char* reason_name(client::ChoiceReason reason) {
  switch (reason) {
    case client::ChoiceReason::kFixed:      return "fixed";
    case client::ChoiceReason::kUnmeasured: break;
    case client::ChoiceReason::kSmall:      return "small";
    case client::ChoiceReason::kWhole:      return "whole";
    case client::ChoiceReason::kSliced:     return "sliced";
  }
  return "unmeasured";
}

py::dict chunk_dict(const client::ChunkRecord& chunk) {
  py::dict fields;
  fields["cost_class"] = chunk.cost_class;
  fields["num_tokens"] = chunk.num_tokens;
  fields["num_chunks"] = chunk.num_chunks;
  fields["num_slices"] = chunk.choice.taken.num_slices;
  fields["window"] = chunk.choice.taken.window;
  fields["reason"] = reason_name(chunk.choice.reason);
  fields["forecast_ns"] = chunk.choice.taken.ns;
  fields["wait_ns"] = chunk.choice.taken.wait_ns;
  fields["send_ns"] = chunk.choice.send_ns;
  fields["compute_ns"] = chunk.choice.compute_ns;
  fields["receive_ns"] = chunk.choice.receive_ns;
  py::list considered;
  for (int i = 0; i < chunk.choice.num_considered; ++i) {
    const client::SliceForecast& one = chunk.choice.considered[static_cast<size_t>(i)];
    considered.append(py::make_tuple(one.num_slices, one.window, one.ns));
  }
  fields["considered"] = considered;
  const uint32_t kept = std::min(chunk.num_measured, client::ChunkRecord::kKept);
  fields["predicted_ns"] =
      std::vector<double>(chunk.predicted_ns.begin(), chunk.predicted_ns.begin() + kept);
  fields["measured_ns"] =
      std::vector<double>(chunk.measured_ns.begin(), chunk.measured_ns.begin() + kept);
  return fields;
}

}  // namespace

CountersByPlace counters_dict(const std::vector<client::CountersOf>& list) {
  CountersByPlace all;
  for (const client::CountersOf& one : list) {
    const client::Counters& counters = one.counters;
    py::dict fields;
    fields["calls"] = counters.calls;
    fields["rows"] = counters.rows;
    fields["pairs"] = counters.pairs;
    fields["request_bytes"] = counters.request_bytes;
    fields["reply_bytes"] = counters.reply_bytes;
    fields["floor_bytes"] = counters.floor_bytes;
    fields["wait_ns"] = counters.wait_ns;
    fields["worker_compute_ns"] = counters.worker_compute_ns;
    fields["worker_queue_ns"] = counters.worker_queue_ns;
    fields["splits"] = counters.splits;
    fields["failovers"] = counters.failovers;
    fields["hedges"] = counters.hedges;
    fields["hedges_won"] = counters.hedges_won;
    fields["hedge_request_bytes"] = counters.hedge_request_bytes;
    fields["hedge_reply_bytes"] = counters.hedge_reply_bytes;
    fields["superseded"] = counters.superseded;
    fields["parked_ns"] = counters.parked_ns;
    all[py::make_tuple(one.worker, one.layer)] = fields;
  }
  return all;
}

py::typing::List<Fields> worker_dicts(const std::vector<client::WorkerReport>& list) {
  py::typing::List<Fields> all;
  for (const client::WorkerReport& report : list) {
    py::dict fields;
    fields["name"] = report.name;
    fields["state"] = worker_state(report);
    fields["path"] = client::path_state_name(report.path);
    fields["reason"] = report.reason;
    fields["quarantined_slots"] = report.quarantined_slots;
    fields["stale_replies"] = report.stale_replies;
    fields["generation"] = report.generation;
    all.append(fields);
  }
  return all;
}

py::typing::List<Fields> forecast_dicts(const std::vector<client::WorkerForecast>& list) {
  py::typing::List<Fields> all;
  for (const client::WorkerForecast& worker : list) {
    py::dict fields, compute;
    for (const auto& [cost_class, found] : worker.compute) {
      compute[py::int_(cost_class)] =
          coefficients_dict(found, worker.compute_residual.at(cost_class), "pair");
    }
    py::list chunks;
    for (const client::ChunkRecord& chunk : worker.chunks) chunks.append(chunk_dict(chunk));
    fields["name"] = worker.name;
    fields["send"] = coefficients_dict(worker.send, worker.send_residual, "byte");
    fields["receive"] = coefficients_dict(worker.receive, worker.receive_residual, "byte");
    fields["compute"] = compute;
    fields["clock_offset_ns"] = worker.clock_offset_ns;
    fields["chunks"] = chunks;
    all.append(fields);
  }
  return all;
}

py::typing::List<Counts> trace_dicts(const std::vector<client::SliceTrace>& list) {
  py::typing::List<Counts> all;
  for (const client::SliceTrace& trace : list) {
    py::dict fields;
    fields["call_id"] = trace.call_id;
    fields["layer"] = trace.layer;
    fields["shard"] = trace.shard;
    fields["worker"] = trace.worker;
    fields["slice"] = trace.slice;
    fields["num_rows"] = trace.num_rows;
    fields["begun_ns"] = trace.begun_ns;
    fields["encode_start_ns"] = trace.encode_start_ns;
    fields["published_ns"] = trace.published_ns;
    fields["arrived_ns"] = trace.arrived_ns;
    fields["combined_ns"] = trace.combined_ns;
    fields["worker_received_ns"] = trace.worker_received_ns;
    fields["worker_started_ns"] = trace.worker_started_ns;
    fields["worker_finished_ns"] = trace.worker_finished_ns;
    all.append(fields);
  }
  return all;
}

}  // namespace dflash::bindings
