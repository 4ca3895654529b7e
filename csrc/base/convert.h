// Bulk conversions between wire, host and weight dtypes: vectorised, exact when widening,
// round-to-nearest-even when narrowing, with range detection in the same pass (rules: a finite
// value that becomes infinite fails the call).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace dflash {

// Converts `count` elements. Source and destination must not overlap; no alignment is required.
// Equal dtypes copy bits. Returns false if any finite source value became infinite (all elements
// are still written). NaN stays NaN, infinity stays infinity; the bits do not depend on the
// instruction set.
bool convert(Dtype from, const std::byte* source, Dtype to, std::byte* destination, size_t count);

// Exact widening to float32.
void widen(Dtype from, const std::byte* source, float* destination, size_t count);

// accumulator[i] += widen(source[i]), float32, one rounding per element.
void widen_add(Dtype from, const std::byte* source, float* accumulator, size_t count);

}  // namespace dflash
