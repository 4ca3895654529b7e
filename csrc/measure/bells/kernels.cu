// The one translation unit of the kernel that measures, for nvcc and for clang -x hip.
// SPDX-License-Identifier: Apache-2.0
#include "measure/bells/ring_bells.h"
