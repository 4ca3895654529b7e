// Of which llama.cpp the headers were, and whether the running one is the same. Two of the headers
// are internal; GGML_BACKEND_API_VERSION has stayed the same while tables changed. So a plug-in is
// built for one version, and refuses any other that it can recognise.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace dflash::ggml_plugin {

struct GgmlVersion {
  std::string version;  // as ggml_version() gives it; "" where nobody says
  std::string commit;   // as ggml_commit() gives it; "" or "unknown" where nobody says
};

// That of the headers, as the build was told.
GgmlVersion built_for();

// That of the ggml which `caller`, an address in its code, belongs to. Empty for a static build,
// which exports no symbols.
GgmlVersion running_ggml(const void* caller);

// "" where the two do not contradict each other, else a sentence with both and the command to build
// anew.
std::string mismatch(const GgmlVersion& built, const GgmlVersion& running);

// What this build was made for, as JSON: version and commit of ggml's headers, the tag of
// llama.cpp, GGML_BACKEND_API_VERSION, and of each struct of ggml that the plug-in reads or fills
// the size and the offsets of the members that it uses.
std::string build_record();

}  // namespace dflash::ggml_plugin
