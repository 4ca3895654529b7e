// What bind_client.cc needs of bind_call.cc.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "bindings/client_box.h"
#include "bindings/token_batch_box.h"

namespace dflash::bindings {

// Submits a call and waits for it, with the GIL released. Raises how the call ended. A signal
// abandons the call.
void run_call(const ClientBox& box, uint32_t layer, const TokenBatchBox& batch);

}  // namespace dflash::bindings
