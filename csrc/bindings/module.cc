// Registers the components of the extension and does nothing else.
// SPDX-License-Identifier: Apache-2.0
#include "bindings/module.h"

#include "bindings/errors.h"

PYBIND11_MODULE(_core, module) {
  using namespace dflash::bindings;
  module.doc() = "The C++ core of dflash_moe: transports, worker loop, client, CPU kernels.";
  module.attr("__version__") = DFLASH_VERSION;
  module.def("error_codes", &error_codes);
  bind_codec(module);
  bind_numerics(module);
  bind_secure(module);
  bind_transport(module);
  bind_store(module);
  bind_plugin(module);
  bind_host_device(module);
  bind_worker(module);
  bind_slot_plan(module);
  bind_client(module);
  bind_call(module);
  bind_device_step(module);
  bind_dlpack(module);
  bind_oracle(module);
  bind_formats(module);
  bind_host_pool(module);
  bind_linear(module);
  bind_rows(module);
  bind_attention(module);
}
