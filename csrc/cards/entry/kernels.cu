// The one translation unit of the kernels in a plug-in for real cards, for nvcc and for clang -x
// hip: those that compute experts and those of device steps, in one image.
// SPDX-License-Identifier: Apache-2.0
#include "cards/device_exchange/kernels/all.h"
#include "cards/kernels/all.h"
