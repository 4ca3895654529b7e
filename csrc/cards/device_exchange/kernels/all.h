// Every kernel of exchange_kernels.h, for the translation unit of a vendor
// (cards/entry/kernels.cu) and for the simulator's.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/device_exchange/kernels/await_replies.h"
#include "cards/device_exchange/kernels/combine_replies.h"
#include "cards/device_exchange/kernels/pack_requests.h"
