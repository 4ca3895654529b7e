// Where the plug-in of a backend lies: next to the core, or else in an installed package for cards,
// of which only Python knows.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace dflash::bindings {

// Returns the folder of the core where the plug-in lies in it or no package has one, and else the
// package's. Needs the GIL. Raises what `card_packages.directory_of` raises: UnsupportedError for a
// package of another core.
std::string plugin_directory(const std::string& backend);

}  // namespace dflash::bindings
