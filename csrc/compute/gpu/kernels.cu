// The one translation unit of all kernels, for nvcc and for clang -x hip.
// SPDX-License-Identifier: Apache-2.0
#include "compute/gpu/kernels/all.h"
