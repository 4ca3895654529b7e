// Binds what chooses tokens from rows of logits in the processor's memory.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings/errors.h"
#include "bindings/typed.h"
#include "compute/operators/draw.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

// Row, temperature, top_k, top_p, min_p, uniform.
using DrawFields = std::tuple<size_t, double, int64_t, double, double, double>;

template <class Value>
std::vector<int64_t> draw_rows(uintptr_t address, size_t stride_bytes, size_t width,
                               const std::vector<DrawFields>& draws) {
  thread_local compute::DrawScratch scratch;
  std::vector<int64_t> found;
  found.reserve(draws.size());
  for (const auto& [row, temperature, top_k, top_p, min_p, uniform] : draws) {
    const std::span<const Value> logits{
        reinterpret_cast<const Value*>(address + row * stride_bytes), width};
    found.push_back(
        compute::draw_token(logits, {temperature, top_k, top_p, min_p, uniform}, scratch));
  }
  return found;
}

std::vector<int64_t> draw_tokens(uintptr_t address, size_t stride_bytes, const std::string& dtype,
                                 size_t width, const std::vector<DrawFields>& draws) {
  if (dtype != "f32" && dtype != "f64")
    raise(Error{ErrorCode::kInvalidArgument, "logits in " + dtype + "; allowed: f32, f64"});
  if (width < 1 || width > (size_t{1} << 22)) {
    raise(Error{ErrorCode::kInvalidArgument,
                "rows of " + std::to_string(width) + " logits; allowed: 1..4194304"});
  }
  for (const DrawFields& one : draws) {
    if (!(std::get<1>(one) >= 0.0))
      raise(Error{ErrorCode::kInvalidArgument, "a draw needs a temperature of at least 0"});
  }
  py::gil_scoped_release unlocked;
  return dtype == "f32" ? draw_rows<float>(address, stride_bytes, width, draws)
                        : draw_rows<double>(address, stride_bytes, width, draws);
}

}  // namespace

void bind_draw(py::module_& module) {
  module.def(
      "draw_tokens", &draw_tokens, py::arg("logits_address"), py::arg("stride_bytes"),
      py::arg("dtype"), py::arg("width"), py::arg("draws"),
      "Returns for each draw (row, temperature, top_k, top_p, min_p, uniform) the token id "
      "that `uniform` in [0, 1) points at in a row of `width` logits in f32 or f64; -1 where "
      "the row's largest logit is not finite. csrc/compute/operators/draw.h says what a "
      "token weighs; at temperature 0 it is the first of the largest. ConfigError for other "
      "dtypes and widths, and for a temperature below 0.");
}

}  // namespace dflash::bindings
