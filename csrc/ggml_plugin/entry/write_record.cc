// Prints what a plug-in from this build is built for; the build keeps it beside the plug-in, where
// the launcher reads it.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "ggml_plugin/build_record.h"

int main() {
  std::fputs(dflash::ggml_plugin::build_record().c_str(), stdout);
  return 0;
}
