// Binds what this build and this processor compute: numerics classes, kernel sets, instruction
// sets.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <string>
#include <vector>

#include "base/float_mode.h"
#include "bindings/errors.h"
#include "compute/cpu/instruction_sets.h"
#include "compute/numerics.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (compute::Isa isa : compute::kAllIsas) {
    if (compute::isa_is_supported(isa)) names.emplace_back(compute::isa_name(isa));
  }
  return names;
}

std::vector<std::string> cpu_features() {
  std::vector<std::string> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
#define DFLASH_FEATURE(name) \
  if (__builtin_cpu_supports(name)) found.emplace_back(name)
  DFLASH_FEATURE("sse4.2");
  DFLASH_FEATURE("avx2");
  DFLASH_FEATURE("fma");
  DFLASH_FEATURE("f16c");
  DFLASH_FEATURE("avx512f");
  DFLASH_FEATURE("avx512bw");
  DFLASH_FEATURE("avx512vl");
  DFLASH_FEATURE("avx512dq");
  DFLASH_FEATURE("avx512vnni");
  DFLASH_FEATURE("avx512bf16");
#undef DFLASH_FEATURE
#elif defined(__aarch64__)
  const unsigned long features = getauxval(AT_HWCAP), more = getauxval(AT_HWCAP2);
  if (features & HWCAP_ASIMD) found.emplace_back("neon");
  if (features & HWCAP_CRC32) found.emplace_back("crc32");
  if (features & HWCAP_ASIMDDP) found.emplace_back("dotprod");
  if (more & HWCAP2_I8MM) found.emplace_back("i8mm");
  if (more & HWCAP2_BF16) found.emplace_back("bf16");
#endif
  return found;
}

std::vector<std::string> numerics_classes(const std::string& isa_name) {
  const compute::Isa isa = unwrap(compute::parse_isa(isa_name));
  std::vector<std::string> names;
  for (const compute::NumericsFacts& facts : compute::numerics_table()) {
    if (compute::isa_computes(isa, facts.numerics)) names.emplace_back(facts.name);
  }
  return names;
}

// The backends that offer a class. "cpu" is among them if a kernel set for this build's kind of
// processor offers it.
std::vector<std::string> offered_by(const compute::NumericsFacts& facts) {
  std::vector<std::string> backends;
  if (*facts.kernel_sets() != 0) backends.emplace_back("cpu");
  if (*facts.offers.cuda != 0) backends.emplace_back("cuda");
  if (*facts.offers.hip != 0) backends.emplace_back("hip");
  return backends;
}

const char* inputs_word(const compute::NumericsFacts& facts) {
  constexpr const char* kWords[] = {"none", "bf16", "int8", "f16"};
  return kWords[static_cast<size_t>(facts.inputs)];
}

const char* weights_word(const compute::NumericsFacts& facts) {
  constexpr const char* kWords[] = {"none", "bf16", "f16"};
  return kWords[static_cast<size_t>(facts.weights)];
}

std::vector<compute::NumericsFacts> numerics_table() {
  const auto table = compute::numerics_table();
  return {table.begin(), table.end()};
}

}  // namespace

void bind_numerics(py::module_& module) {
  using Facts = compute::NumericsFacts;
  module.def("supported_isas", &supported_isas,
             "The kernel sets that this processor can run, the best one last, for example "
             "[\"reference\", \"scalar\", \"avx2\", \"avx512\", \"avx512vnni\", \"avx512bf16\"].");
  module.def("best_isa", [] { return std::string(compute::isa_name(compute::best_isa())); });
  module.def(
      "parse_isa",
      [](const std::string& name) {
        return std::string(compute::isa_name(unwrap(compute::parse_isa(name))));
      },
      py::arg("name"),
      "Returns the name if it is supported. ConfigError lists the supported ones.");
  module.def("cpu_features", &cpu_features);
  py::class_<Facts>(module, "NumericsFacts",
                    "A row of the table of numerics classes (csrc/compute/numerics.h).")
      .def_readonly("name", &Facts::name)
      .def_readonly("activations", &Facts::activations,
                    "A topology asks for the class by this word.")
      .def_property_readonly("inputs", &inputs_word,
                             "Inputs are rounded to this: none, bf16, int8 or f16.")
      .def_readonly("group_inputs", &Facts::group_inputs,
                    "So many inputs of a row share a scale; 0 means that none do.")
      .def_property_readonly("weights", &weights_word,
                             "Weights are rounded to this: none, bf16 or f16.")
      .def_property_readonly(
          "is_bounded", &Facts::is_bounded,
          "The bits of a bounded class depend on the architecture of a card, within a bound of the "
          "reference. All others have the same bits everywhere.")
      .def_property_readonly(
          "offered_by", &offered_by,
          "These offer it, of cpu (processors of this build's kind), cuda and hip.");
  module.def("set_canonical_float_mode", &set_canonical_float_mode,
             "Gives the calling thread, which must be one of the package's own, the mode in which "
             "canonical bits are computed: to nearest, nothing flushed to zero.");
  module.def("numerics_table", &numerics_table, "All classes, the default first.");
  module.def("numerics_classes", &numerics_classes, py::arg("isa"),
             "The names of the classes that this kernel set computes, the default first.");
  module.def(
      "check_numerics",
      [](const std::string& numerics, const std::string& weight_dtype) {
        unwrap(compute::check_numerics(unwrap(compute::parse_numerics(numerics)),
                                       unwrap(compute::parse_resident_formats(weight_dtype))));
      },
      py::arg("numerics"), py::arg("weight_dtype"),
      "UnsupportedError names the formats that the class takes.");
}

}  // namespace dflash::bindings
