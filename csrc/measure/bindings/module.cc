// dflash_moe._measure: what benchmarks need in C++ and nothing else loads. It takes channels and
// devices of the core, whose classes must be registered before it is used.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

namespace dflash::measure {

void bind_ipc(pybind11::module_& module);      // bind_ipc.cc
void bind_experts(pybind11::module_& module);  // bind_experts.cc
void bind_bells(pybind11::module_& module);    // bind_bells.cc

}  // namespace dflash::measure

PYBIND11_MODULE(_measure, module) {
  using namespace dflash::measure;
  module.doc() =
      "What benchmarks need in C++: peaks of this machine, layers without anything around them, "
      "round trips of transports, doorbells of cards. Only benchmarks import it. Errors are those "
      "of "
      "`_core`, whose channels and devices it takes. Each `rounds` gives one sample a round.";
  pybind11::module_::import("dflash_moe._core");
  bind_ipc(module);
  bind_experts(module);
  bind_bells(module);
}
