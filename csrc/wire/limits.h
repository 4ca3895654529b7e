// Every limit of the data protocol in one place. `make check` compares the table in
// docs/protocol.md with this file.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace dflash::wire {

// Rows of one message, which is also the largest batch capacity.
inline constexpr uint32_t kMaxRows = 4096;
inline constexpr uint32_t kMaxPairsPerRow = 256;          // the top-k of known models is <= 64
inline constexpr uint32_t kMaxPairs = kMaxRows * 64;      // (row, expert) pairs of one message
inline constexpr uint32_t kMaxExpertsPerShard = 65535;    // local ids are u16
inline constexpr uint32_t kMaxRowWidth = 65536;           // elements of one row, in or out
inline constexpr uint32_t kMaxPayloadBytes = 256u << 20;  // the cap of an arena
inline constexpr uint32_t kMaxLayers = 4096;
inline constexpr uint32_t kMaxErrorTextBytes = 1024;

}  // namespace dflash::wire
