// The headers of the llama.cpp for which this plug-in is built; the build names their folder. The
// two that end in -impl are internal to ggml and promise no stability, so a plug-in fits exactly
// the sources it was built against (build_record.h). Of all functions that they declare none is
// called: a static llama.cpp exports none, and a plug-in that imports nothing loads there, too.
// SPDX-License-Identifier: Apache-2.0
#pragma once

// ggml's C headers want these before them.
#include <cstddef>
#include <cstdint>

#include <ggml-backend-impl.h>
#include <ggml-backend.h>
#include <ggml-impl.h>
#include <ggml.h>
