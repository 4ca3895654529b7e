// A call's tensors as Python holds them: the value that every room passes on, and what keeps its
// memory alive.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include "base/token_batch.h"

namespace dflash::bindings {

struct TokenBatchBox {
  TokenBatch batch;
  pybind11::object owners;  // the tensors, or whatever else keeps the addresses valid
};

}  // namespace dflash::bindings
