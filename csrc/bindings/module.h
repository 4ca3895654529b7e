// The components of the extension, which module.cc registers in this order.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace dflash::bindings {

void bind_codec(pybind11::module_& module);
void bind_numerics(pybind11::module_& module);
void bind_secure(pybind11::module_& module);
void bind_transport(pybind11::module_& module);
void bind_store(pybind11::module_& module);
void bind_plugin(pybind11::module_& module);
void bind_host_device(pybind11::module_& module);
void bind_device_step(pybind11::module_& module);
void bind_host_pool(pybind11::module_& module);
void bind_worker(pybind11::module_& module);
void bind_token_batch(pybind11::module_& module);
void bind_client(pybind11::module_& module);
void bind_call(pybind11::module_& module);
void bind_slot_plan(pybind11::module_& module);
void bind_dlpack(pybind11::module_& module);
void bind_handover(pybind11::module_& module);
void bind_oracle(pybind11::module_& module);
void bind_formats(pybind11::module_& module);
void bind_linear(pybind11::module_& module);
void bind_rows(pybind11::module_& module);
void bind_attention(pybind11::module_& module);

}  // namespace dflash::bindings
