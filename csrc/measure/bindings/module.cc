// dflash_moe._measure: what benchmarks need in C++ and nothing else loads. It takes channels and
// devices of the core, whose classes must be registered before it is used.
// SPDX-License-Identifier: Apache-2.0
#include "measure/bindings/module.h"

PYBIND11_MODULE(_measure, module) {
  using namespace dflash::measure;
  module.doc() = "Benchmarks of dflash_moe: peaks, layers, transports, doorbells.";
  pybind11::module_::import("dflash_moe._core");
  bind_ipc(module);
  bind_experts(module);
  bind_bells(module);
}
