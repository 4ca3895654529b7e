// SPDX-License-Identifier: Apache-2.0
#include "bindings/plugin_directory.h"

#include <pybind11/pybind11.h>
#include <unistd.h>

#include "plugin/loader.h"

namespace py = pybind11;

namespace dflash::bindings {

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
