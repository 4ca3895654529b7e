// The components of the extension that measures; module.cc registers them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace dflash::measure {

void bind_ipc(pybind11::module_& module);
void bind_experts(pybind11::module_& module);
void bind_bells(pybind11::module_& module);

}  // namespace dflash::measure
