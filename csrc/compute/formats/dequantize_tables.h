// The levels of the formats with tables, for the reference and for the kernels of every instruction
// set, because of which there is no std:: code here.
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace dflash::compute {

// The values of e2m1: a sign, two bits of exponent, one of mantissa.
inline constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
// ggml's non-linear levels of iq4_nl and iq4_xs.
inline constexpr float kIq4Levels[16] = {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f,
                                         -22.0f,  -10.0f,  1.0f,   13.0f,  25.0f,  38.0f,
                                         53.0f,   69.0f,   89.0f,  113.0f};

}  // namespace dflash::compute
