// What the client reports, as Python dictionaries whose keys are the names of fields.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "bindings/typed.h"
#include "client/expert_client.h"

namespace dflash::bindings {

using CountersByPlace =
    pybind11::typing::Dict<pybind11::typing::Tuple<pybind11::int_, pybind11::int_>, Counts>;
// Maps (worker, layer) to the fields of Counters.
CountersByPlace counters_dict(const std::vector<client::CountersOf>& list);
pybind11::typing::List<Fields> worker_dicts(const std::vector<client::WorkerReport>& list);
pybind11::typing::List<Fields> forecast_dicts(const std::vector<client::WorkerForecast>& list);
pybind11::typing::List<Counts> trace_dicts(const std::vector<client::SliceTrace>& list);

}  // namespace dflash::bindings
