// Result<T> is a value or a typed error. Every function returns one that can fail for a reason
// outside the program. It depends on nothing. Programming errors use check(), which remote bytes
// and user input must never reach.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "base/error_code.h"

namespace dflash {

// Where an error happened, for programs. Messages are for people, and nobody parses them. Whoever
// knows a field fills it in on the error's way up. What is set already stays, because the place
// that was nearest to the cause knows best.
struct ErrorPlace {
  std::string worker;             // the worker's name; empty where the error is at none
  std::optional<uint32_t> layer;  // index in the layer table
  std::optional<uint32_t> token;  // row of the call's hidden_states
  std::optional<uint32_t> slot;   // slot of the worker's data path
};

struct [[nodiscard]] Error {
  ErrorCode code;
  std::string message;
  ErrorPlace place = {};

  // Prefixes the message with what was being done, as in
  // error("truncated").with("while reading shard 3").
  Error with(const std::string& context) && {
    message = context + ": " + message;
    return std::move(*this);
  }
  // Adds the fields that are set in `known` and not yet here. The message stays as it is.
  Error at(const ErrorPlace& known) && {
    if (place.worker.empty()) place.worker = known.worker;
    if (!place.layer) place.layer = known.layer;
    if (!place.token) place.token = known.token;
    if (!place.slot) place.slot = known.slot;
    return std::move(*this);
  }
};

// Makes an Error of a failed system call, always in the same words: what was being done, the
// system's own text, and the remedy where the reason is a limit of this process. The code is
// kOutOfMemory for a lack of memory or space, otherwise kSystem. Any thread.
Error system_error(const std::string& what, int error_number = errno);

// Reports a broken internal invariant and aborts. It uses builtins instead of std::source_location,
// which clang 14 cannot take from the C++ library of GCC 12.
[[noreturn]] inline void fail_check(const char* what, const char* file, unsigned line) {
  std::fprintf(stderr, "dflash_moe internal error: %s (%s:%u)\n", what, file, line);
  std::abort();
}
inline void check(bool holds, const char* what, const char* file = __builtin_FILE(),
                  unsigned line = __builtin_LINE()) {
  if (!holds) [[unlikely]]
    fail_check(what, file, line);
}

// The value of a Result that has none to give.
struct Unit {};

template <class T = Unit>
class [[nodiscard]] Result {
 public:
  Result(T value)
      : state_(std::in_place_index<0>, std::move(value)) {}  // NOLINT: implicit by design
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }
  T& value() & {
    check(ok(), "value() of an error");
    return std::get<0>(state_);
  }
  const T& value() const& {
    check(ok(), "value() of an error");
    return std::get<0>(state_);
  }
  T&& value() && {
    check(ok(), "value() of an error");
    return std::get<0>(std::move(state_));
  }
  Error& error() & {
    check(!ok(), "error() of a value");
    return std::get<1>(state_);
  }
  const Error& error() const& {
    check(!ok(), "error() of a value");
    return std::get<1>(state_);
  }
  Error&& error() && {
    check(!ok(), "error() of a value");
    return std::get<1>(std::move(state_));
  }

 private:
  std::variant<T, Error> state_;
};

using Status = Result<Unit>;
inline Status ok() { return Unit{}; }

// Returns the error of `expr` from the enclosing function, if it has one. The value is dropped.
#define DFLASH_TRY(expr)                                      \
  do {                                                        \
    if (auto dflash_status_ = (expr); !dflash_status_.ok()) { \
      return std::move(dflash_status_).error();               \
    }                                                         \
  } while (0)

}  // namespace dflash
