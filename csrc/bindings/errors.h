// The only place where errors become exceptions: one table from ErrorCode to the classes of
// dflash_moe.errors.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

#include "base/result.h"
#include "bindings/typed.h"

namespace dflash::bindings {

// Raises the Python class of the error's code with its message. The caller holds the GIL.
[[noreturn]] void raise(const Error& error);

// Returns the value, or raises the error. The caller holds the GIL.
template <class T>
T unwrap(Result<T> result) {
  if (!result.ok()) raise(result.error());
  return std::move(result).value();
}
inline void unwrap(Status status) {
  if (!status.ok()) raise(status.error());
}

// Maps each code's name to (value, class), for the completeness test and docs/errors.md.
pybind11::typing::Dict<pybind11::str, pybind11::typing::Tuple<pybind11::int_, ErrorClass>>
error_codes();

}  // namespace dflash::bindings
