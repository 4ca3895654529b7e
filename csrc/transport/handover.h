// What every kind checks about the other end's handover before it uses any of it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "transport/kinds.h"

namespace dflash::transport {

// Checks how many descriptors and bytes were brought, an encrypted connection counting as a
// descriptor. `what` is "offer" or "answer", for the message. Errors: kProtocol where either number
// differs.
inline Status check_handover(const TransportKind& kind, const char* what, const Handover& found,
                             size_t num_descriptors, size_t num_bytes = 0) {
  const size_t num_found = found.descriptors.size() + (found.secured != nullptr ? 1 : 0);
  const bool may_be_secured = found.secured == nullptr || kind.is_dialled;
  if (may_be_secured && num_found == num_descriptors && found.bytes.size() == num_bytes)
    return ok();
  return Error{ErrorCode::kProtocol, std::string("transport ") + kind.name + ": its " + what +
                                         " brought " + std::to_string(num_found) +
                                         " descriptors and " + std::to_string(found.bytes.size()) +
                                         " bytes; it has " + std::to_string(num_descriptors) +
                                         " and " + std::to_string(num_bytes)};
}

}  // namespace dflash::transport
