// What bind_client.cc needs of calls.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "bindings/client_box.h"
#include "bindings/token_batch_box.h"

namespace dflash::bindings {

// Submits and waits; the GIL is released meanwhile. Raises how the call ended; a signal abandons
// it.
void run_call(const ClientBox& box, uint32_t layer, const TokenBatchBox& batch);

}  // namespace dflash::bindings
