// What the client reports, as Python dictionaries whose keys are the field names
// (dflash_moe/_core.pyi).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

#include "client/expert_client.h"

namespace dflash::bindings {

using CountersList = std::vector<std::pair<std::pair<uint32_t, uint32_t>, client::Counters>>;

pybind11::dict counters_dict(const CountersList& list);  // (worker, layer) -> fields
pybind11::list worker_dicts(const std::vector<client::WorkerReport>& list);
pybind11::list forecast_dicts(const std::vector<client::WorkerForecast>& list);
pybind11::list trace_dicts(const std::vector<client::SliceTrace>& list);

}  // namespace dflash::bindings
