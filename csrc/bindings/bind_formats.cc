// Binds weight formats: what they are, their values, and the bytes that they take in a worker.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>

#include "base/float_mode.h"
#include "bindings/arguments.h"
#include "bindings/typed.h"
#include "cards/record_layout.h"
#include "compute/cpu/cpu_backend.h"
#include "compute/cpu/panels/panel_layout.h"
#include "compute/formats/dequantize.h"
#include "compute/formats/value_checks.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

using FloatArray = py::array_t<float, py::array::c_style | py::array::forcecast>;

py::typing::Dict<py::str, Counts> weight_formats() {
  py::typing::Dict<py::str, Counts> formats;
  for (uint8_t value = 0; value < compute::kNumWeightFormats; ++value) {
    const compute::FormatFacts& facts =
        compute::format_facts(static_cast<compute::WeightFormat>(value));
    Counts fields;
    fields["block"] = facts.block;
    fields["block_bytes"] = facts.block_bytes;
    fields["scale_outputs"] = facts.scale_outputs;
    fields["scale_inputs"] = facts.scale_inputs;
    fields["scale_bytes"] = facts.scale_bytes;
    fields["is_stored"] = facts.is_stored;
    const auto format = static_cast<compute::WeightFormat>(value);
    const compute::PanelLayout layout = compute::panel_layout(format);
    fields["has_panels"] = compute::has_panels(format);
    fields["is_on_cards"] = compute::gpu::is_card_format(format);
    // What has no panels stays as it is stored.
    const bool is_kept = compute::is_float(format) || !compute::has_panels(format);
    fields["record"] = is_kept ? facts.block : layout.record_inputs;
    fields["record_bytes"] = is_kept ? size_t{facts.block_bytes} : layout.record_bytes();
    formats[facts.name] = fields;
  }
  return formats;
}

py::array_t<float> dequantize(const std::string& format_name, const py::buffer& data,
                              uint32_t outputs, uint32_t inputs, const py::buffer& scales) {
  const ByteMatrix source = byte_matrix(format_name, data, outputs, inputs, scales);
  py::array_t<float> values({static_cast<py::ssize_t>(outputs), static_cast<py::ssize_t>(inputs)});
  float* target = values.mutable_data();
  {
    py::gil_scoped_release unlocked;
    const CanonicalFloatMode mode;
    compute::dequantize(source.view, 0, outputs, target);
  }
  return values;
}

py::array_t<float> requantize(const std::string& format_name, const FloatArray& values) {
  const compute::WeightFormat format = unwrap(compute::parse_weight_format(format_name));
  if (compute::format_facts(format).is_stored) {
    raise(Error{ErrorCode::kInvalidArgument,
                "weights are quantised at load to int8_g32 or int4_g32, not to " + format_name});
  }
  if (values.ndim() != 2)
    raise(Error{ErrorCode::kInvalidArgument, "a weight matrix must have two dimensions"});
  const auto outputs = static_cast<uint32_t>(values.shape(0)),
             inputs = static_cast<uint32_t>(values.shape(1));
  const compute::MatrixView view{reinterpret_cast<const std::byte*>(values.data()),
                                 compute::WeightFormat::kF32,
                                 outputs,
                                 inputs,
                                 inputs,
                                 1};
  unwrap(compute::check_values("weights", view, format, 0, outputs));
  py::array_t<float> held({values.shape(0), values.shape(1)});
  const CanonicalFloatMode mode;
  std::copy_n(values.data(), values.size(), held.mutable_data());
  for (uint32_t o = 0; o < outputs; ++o)
    compute::requantize_row(format, held.mutable_data() + size_t{o} * inputs, inputs);
  return held;
}

uint64_t packed_bytes(const Fields& spec, uint32_t num_experts, const std::string& weight_dtype,
                      const std::string& isa) {
  return compute::CpuBackend::predicted_bytes(
      unwrap(compute::parse_isa(isa)), parse_ffn_spec(spec), num_experts,
      unwrap(compute::parse_resident_formats(weight_dtype)));
}

}  // namespace

ByteMatrix byte_matrix(const std::string& format_name, const py::buffer& data, uint32_t outputs,
                       uint32_t inputs, const py::buffer& scales) {
  ByteMatrix source{data.request(), scales.request(), {}};
  const compute::WeightFormat format = unwrap(compute::parse_weight_format(format_name));
  const compute::FormatFacts& facts = compute::format_facts(format);
  const uint64_t row_bytes = compute::row_bytes(format, inputs);
  const uint64_t scale_row =
      facts.scale_bytes == 0
          ? 0
          : uint64_t{(inputs + facts.scale_inputs - 1) / facts.scale_inputs} * facts.scale_bytes;
  const uint64_t scale_rows =
      facts.scale_bytes == 0 ? 0 : (outputs + facts.scale_outputs - 1) / facts.scale_outputs;
  const auto num_bytes = [](const py::buffer_info& info) {
    return static_cast<uint64_t>(info.size * info.itemsize);
  };
  if (PyBuffer_IsContiguous(source.data.view(), 'C') == 0 ||
      PyBuffer_IsContiguous(source.scales.view(), 'C') == 0) {
    raise(Error{ErrorCode::kInvalidArgument,
                "a matrix in " + format_name + " must be contiguous; pass a contiguous copy"});
  }
  if (!facts.is_stored)
    raise(Error{ErrorCode::kInvalidArgument,
                format_name + " is made at load and has no stored bytes; use requantize"});
  if (outputs == 0 || inputs == 0 || inputs % facts.block != 0) {
    raise(Error{ErrorCode::kInvalidArgument,
                format_name + " needs at least one output and a multiple of " +
                    std::to_string(facts.block) + " inputs, got [" + std::to_string(outputs) +
                    ", " + std::to_string(inputs) + "]"});
  }
  if (num_bytes(source.data) != outputs * row_bytes ||
      num_bytes(source.scales) != scale_rows * scale_row) {
    raise(Error{ErrorCode::kInvalidArgument,
                "[" + std::to_string(outputs) + ", " + std::to_string(inputs) + "] in " +
                    format_name + " takes " + std::to_string(outputs * row_bytes) + " bytes and " +
                    std::to_string(scale_rows * scale_row) + " of scales, got " +
                    std::to_string(num_bytes(source.data)) + " and " +
                    std::to_string(num_bytes(source.scales))});
  }
  const auto stride =
      compute::is_float(format) ? static_cast<int64_t>(inputs) : static_cast<int64_t>(row_bytes);
  source.view = {static_cast<const std::byte*>(source.data.ptr),
                 format,
                 outputs,
                 inputs,
                 stride,
                 compute::is_float(format) ? 1 : 0};
  if (scale_row != 0) {
    source.view.scales = static_cast<const std::byte*>(source.scales.ptr);
    source.view.scales_stride = static_cast<int64_t>(scale_row);
  }
  return source;
}

void bind_formats(py::module_& module) {
  module.def("weight_formats", &weight_formats,
             "FormatFacts of csrc/compute/formats/weight_format.h by the name of the format, and "
             "the size of a record.");
  module.def("dequantize", &dequantize, py::arg("weight_format"), py::arg("data"),
             py::arg("outputs"), py::arg("inputs"), py::arg("scales") = py::bytes(),
             "Returns a NumPy array of float32 [outputs, inputs]. Both buffers are contiguous.");
  module.def("packed_bytes", &packed_bytes, py::kw_only(), py::arg("spec"), py::arg("num_experts"),
             py::arg("weight_dtype"), py::arg("isa"),
             "The bytes that a CPU worker holds for these experts, biases aside.");
  module.def("requantize", &requantize, py::arg("weight_format"), py::arg("values"),
             "The values with which a worker that holds int8_g32 or int4_g32 computes.");
}

}  // namespace dflash::bindings
