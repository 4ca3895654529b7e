// Declares and registers the components of the extension, and does nothing else.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

#include "bindings/errors.h"

namespace dflash::bindings {

// Each is in the file of its name, but bind_store (bind_worker.cc), bind_token_batch (bind_call.cc)
// and bind_program_run (bind_program.cc).
void bind_codec(pybind11::module_& module);
void bind_numerics(pybind11::module_& module);
void bind_secure(pybind11::module_& module);
void bind_transport(pybind11::module_& module);
void bind_store(pybind11::module_& module);
void bind_plugin(pybind11::module_& module);
void bind_host_device(pybind11::module_& module);
void bind_device_step(pybind11::module_& module);
void bind_host_pool(pybind11::module_& module);
void bind_operator_clock(pybind11::module_& module);
void bind_worker(pybind11::module_& module);
void bind_token_batch(pybind11::module_& module);
void bind_client(pybind11::module_& module);
void bind_call(pybind11::module_& module);
void bind_slot_plan(pybind11::module_& module);
void bind_dlpack(pybind11::module_& module);
void bind_handover(pybind11::module_& module);
void bind_oracle(pybind11::module_& module);
void bind_formats(pybind11::module_& module);
void bind_program(pybind11::module_& module);
void bind_program_run(pybind11::module_& module);
void bind_linear(pybind11::module_& module);
void bind_rows(pybind11::module_& module);
void bind_attention(pybind11::module_& module);
void bind_draw(pybind11::module_& module);

}  // namespace dflash::bindings

PYBIND11_MODULE(_core, module) {
  using namespace dflash::bindings;
  module.doc() =
      "The C++ core: transports, worker loop, client, CPU kernels. Every call that can block "
      "releases the GIL. Errors arrive as the classes of `dflash_moe.errors` (table in "
      "csrc/bindings/errors.cc).\n\n"
      "Row operators (`rms_norm` ... `add_scaled`) take all by position, because keyword arguments "
      "cost 3 us a call, and they are called in every layer. Memory comes as addresses (torch's "
      "data_ptr()), with strides in bytes and dtypes \"f32\", \"f16\", \"bf16\"; the caller keeps "
      "it "
      "alive and vouches for its size. An address of 0 says that there is none. Values are "
      "computed "
      "in float32 and rounded once; a row's bits depend on that row and on the weights alone. "
      "Output "
      "rows may be input rows of the same dtype and stride. Vectors (weights, biases, scales) are "
      "float32 and contiguous, rows of cosines and sines are float32. ConfigError for sizes that "
      "do "
      "not fit.";
  module.attr("__version__") = DFLASH_VERSION;
  module.def("error_codes", &error_codes,
             "The number and the Python class of every ErrorCode by its name in snake_case.");
  bind_codec(module);
  bind_numerics(module);
  bind_secure(module);
  bind_transport(module);
  bind_store(module);
  bind_plugin(module);
  bind_host_device(module);
  bind_host_pool(module);
  bind_operator_clock(module);
  bind_worker(module);
  bind_slot_plan(module);
  bind_token_batch(module);
  bind_client(module);
  bind_call(module);
  bind_device_step(module);
  bind_dlpack(module);
  bind_handover(module);
  bind_oracle(module);
  bind_formats(module);
  bind_program(module);  // to which operators add themselves
  bind_linear(module);
  bind_rows(module);
  bind_attention(module);
  bind_draw(module);
  bind_program_run(module);  // by the plan of a step
}
