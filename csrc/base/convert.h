// Conversions of many elements between the dtypes of wire, host and weights. They are vectorised,
// exact when widening, and round to nearest even when narrowing. The same pass detects finite
// values that become infinite, which fail the call.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace dflash {

// Converts `count` elements. Source and destination must not overlap and need no alignment. Equal
// dtypes copy bits. Returns false if any finite value became infinite; all elements are written
// even then. NaN stays NaN and infinity stays infinity. The bits do not depend on the instruction
// set.
bool convert(Dtype from, const std::byte* source, Dtype to, std::byte* destination, size_t count);

// Widens to float32, which is exact.
void widen(Dtype from, const std::byte* source, float* destination, size_t count);

// Adds widen(source[i]) to accumulator[i] in float32, with one rounding per element.
void widen_add(Dtype from, const std::byte* source, float* accumulator, size_t count);

}  // namespace dflash
