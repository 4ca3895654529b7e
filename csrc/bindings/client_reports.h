// What the client reports, as Python dictionaries whose keys are the field names
// (dflash_moe/_core.pyi).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "client/expert_client.h"

namespace dflash::bindings {

pybind11::dict counters_dict(
    const std::vector<client::CountersOf>& list);  // (worker, layer) -> fields
pybind11::list worker_dicts(const std::vector<client::WorkerReport>& list);
pybind11::list forecast_dicts(const std::vector<client::WorkerForecast>& list);
pybind11::list trace_dicts(const std::vector<client::SliceTrace>& list);

}  // namespace dflash::bindings
