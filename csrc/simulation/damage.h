// Ways to damage a message in place, so that what is left is as hard to tell from a good one as can
// be: headers keep a checksum that matches.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "simulation/faults.h"
#include "simulation/random.h"

namespace dflash::simulation {

// Returns whether whoever receives the message must refuse it, whatever the slot's state. A bit
// that flips in the payload need not be seen in a reply which nobody waits for any more.
bool damage(std::span<std::byte> message, FaultKind kind, Random& random);

// The first bytes of a message as it travels on a socket (transport/stream), with so many of its
// own bytes.
std::vector<std::byte> begun_stream_message(uint32_t slot, std::span<const std::byte> message,
                                            size_t num_bytes);

}  // namespace dflash::simulation
