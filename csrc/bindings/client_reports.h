// What the client reports, as Python dictionaries whose keys are the names of fields
// (dflash_moe/_core.pyi).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "client/expert_client.h"

namespace dflash::bindings {

// Maps (worker, layer) to the fields of Counters.
pybind11::dict counters_dict(const std::vector<client::CountersOf>& list);
pybind11::list worker_dicts(const std::vector<client::WorkerReport>& list);
pybind11::list forecast_dicts(const std::vector<client::WorkerForecast>& list);
pybind11::list trace_dicts(const std::vector<client::SliceTrace>& list);

}  // namespace dflash::bindings
