// The checks of arguments, and the names by which Python knows activations and gates.
// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments.h"
#include "plugin/loader.h"

#include <pybind11/pybind11.h>
#include <unistd.h>

namespace py = pybind11;

namespace dflash::bindings {
namespace {

using compute::Activation;
using compute::GateKind;

struct ActivationName {
  const char* name;
  Activation value;
};
constexpr ActivationName kActivations[] = {
    {"silu",         Activation::kSilu       },
    {"gelu",         Activation::kGelu       },
    {"gelu_tanh",    Activation::kGeluTanh   },
    {"relu",         Activation::kRelu       },
    {"relu_squared", Activation::kReluSquared},
    {"identity",     Activation::kIdentity   },
    {"sigmoid",      Activation::kSigmoid    },
    {"quick_gelu",   Activation::kQuickGelu  },
};
struct GateName {
  const char* name;
  GateKind value;
};
constexpr GateName kGates[] = {
    {"none",           GateKind::kNone         },
    {"gated",          GateKind::kGated        },
    {"clamped_swiglu", GateKind::kClampedSwiglu}
};

template <class Row, size_t N>
auto parse_name(const Row (&rows)[N], const std::string& name, const char* what) {
  std::string allowed;
  for (const Row& row : rows) {
    if (name == row.name) return row.value;
    allowed += (allowed.empty() ? "" : ", ") + std::string(row.name);
  }
  raise(Error{ErrorCode::kUnsupported,
              std::string(what) + " '" + name + "' is not known here; known are " + allowed});
}

}  // namespace

Dtype parse_dtype(const std::string& name) {
  for (uint8_t value = 0; value < kNumDtypes; ++value) {
    if (name == dtype_name(static_cast<Dtype>(value))) return static_cast<Dtype>(value);
  }
  raise(Error{ErrorCode::kInvalidArgument,
              "dtype '" + name + "' is not allowed; choose from f32, f16, bf16"});
}

transport::Side parse_side(const std::string& name) {
  if (name == "host") return transport::Side::kHost;
  if (name == "worker") return transport::Side::kWorker;
  raise(Error{ErrorCode::kInvalidArgument,
              "side '" + name + "' is not allowed; choose from host, worker"});
}

compute::FfnSpec parse_ffn_spec(const py::dict& fields) {
  compute::FfnSpec spec;
  for (const auto& [key, value] : fields) {
    const std::string name = py::cast<std::string>(key);
    if (name == "in_size")
      spec.in_size = py::cast<uint32_t>(value);
    else if (name == "intermediate_size")
      spec.intermediate_size = py::cast<uint32_t>(value);
    else if (name == "out_size")
      spec.out_size = py::cast<uint32_t>(value);
    else if (name == "activation")
      spec.activation = parse_name(kActivations, py::cast<std::string>(value), "activation");
    else if (name == "gate")
      spec.gate = parse_name(kGates, py::cast<std::string>(value), "gate");
    else if (name == "has_gate_up_bias")
      spec.has_gate_up_bias = py::cast<bool>(value);
    else if (name == "has_down_bias")
      spec.has_down_bias = py::cast<bool>(value);
    else if (name == "alpha")
      spec.alpha = py::cast<float>(value);
    else if (name == "up_offset")
      spec.up_offset = py::cast<float>(value);
    else if (name == "gate_max")
      spec.gate_max = py::cast<float>(value);
    else if (name == "up_limit")
      spec.up_limit = py::cast<float>(value);
    else
      raise(Error{ErrorCode::kInvalidArgument, "FfnSpec has no field '" + name + "'"});
  }
  unwrap(spec.validate());
  return spec;
}

std::string plugin_directory(const std::string& backend) {
  const std::string own = plugin::own_directory();
  const std::string file = own + "/libdflash_" + backend + ".so";
  if (backend == "cpu" || ::access(file.c_str(), R_OK) == 0) return own;
  const auto found = py::module_::import("dflash_moe.protocol.card_packages")
                         .attr("directory_of")(backend)
                         .cast<std::string>();
  return found.empty() ? own : found;
}

}  // namespace dflash::bindings
