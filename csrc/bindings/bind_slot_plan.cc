// Binds modes, slices and slots as csrc/client/slot_plan.h plans them.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/arguments.h"
#include "client/slot_plan.h"

namespace py = pybind11;

namespace dflash::bindings {

using client::ShardShape;
using client::SlicePlan;
using client::SlotPlan;

void bind_slot_plan(py::module_& module) {
  py::class_<ShardShape>(module, "ShardShape",
                         "What one shard of one layer asks of the slots of its holder.")
      .def(py::init([](uint32_t in_size, uint32_t out_size, uint32_t top_k, uint32_t num_experts) {
             return ShardShape{in_size, out_size, top_k, num_experts};
           }),
           py::arg("in_size"), py::arg("out_size"), py::arg("top_k"), py::arg("num_experts"));
  py::class_<SlicePlan>(module, "SlicePlan",
                        "A resolved mode. Where `is_measured`, slices and window are upper bounds, "
                        "within which the worker's model chooses.")
      .def_property_readonly(
          "mode", [](const SlicePlan& self) { return std::string(client::mode_name(self.mode)); })
      .def_readonly("slice_tokens", &SlicePlan::slice_tokens)
      .def_readonly("window", &SlicePlan::window)
      .def_readonly("slot_rows", &SlicePlan::slot_rows)
      .def_property_readonly("is_measured", &SlicePlan::is_measured);
  py::class_<SlotPlan>(module, "SlotPlan",
                       "The slots of one worker's data path, and the rows that they were made for.")
      .def(py::init(
               [](uint32_t num_slots, uint32_t rows, uint64_t request_bytes, uint64_t reply_bytes) {
                 return SlotPlan{num_slots, rows, request_bytes, reply_bytes};
               }),
           py::arg("num_slots"), py::arg("rows"), py::arg("request_bytes"), py::arg("reply_bytes"))
      .def_readonly("num_slots", &SlotPlan::num_slots)
      .def_readonly("rows", &SlotPlan::rows)
      .def_readonly("request_bytes", &SlotPlan::request_bytes)
      .def_readonly("reply_bytes", &SlotPlan::reply_bytes)
      .def_property_readonly("arena_bytes", &SlotPlan::arena_bytes)
      .def_property_readonly("geometry", &SlotPlan::geometry)
      .def("holds", &SlotPlan::holds, py::arg("other"));

  module.attr("DEFAULT_ARENA_BYTES") = client::kDefaultArenaBytes;
  module.attr("SPARE_SLOTS") = client::kSpareSlots;
  module.def(
      "plan_slices",
      [](const std::string& mode, uint32_t batch_capacity, uint32_t stream_tokens,
         uint32_t stream_tokens_max) {
        return unwrap(client::plan_slices(unwrap(client::parse_mode(mode)),
                                          {batch_capacity, stream_tokens, stream_tokens_max}));
      },
      py::arg("mode"), py::kw_only(), py::arg("batch_capacity"), py::arg("stream_tokens"),
      py::arg("stream_tokens_max"),
      "ConfigError is raised where `stream_tokens` exceeds `stream_tokens_max`.");
  module.def(
      "plan_slots",
      [](const std::vector<ShardShape>& shards, uint32_t rows, uint32_t num_slots,
         const std::string& request_dtype, const std::string& reply_dtype) {
        return unwrap(client::plan_slots(shards, rows, num_slots, parse_dtype(request_dtype),
                                         parse_dtype(reply_dtype)));
      },
      py::arg("shards"), py::arg("rows"), py::arg("num_slots"), py::arg("request_dtype"),
      py::arg("reply_dtype"));
  module.def(
      "plan_arena",
      [](const std::vector<std::vector<ShardShape>>& workers, const SlicePlan& slices,
         const std::string& request_dtype, const std::string& reply_dtype, uint64_t shared_bytes) {
        return unwrap(client::plan_arena(workers, slices, parse_dtype(request_dtype),
                                         parse_dtype(reply_dtype), shared_bytes));
      },
      py::arg("workers"), py::arg("slices"), py::arg("request_dtype"), py::arg("reply_dtype"),
      py::arg("shared_bytes") = 0);
}

}  // namespace dflash::bindings
