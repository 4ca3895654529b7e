// How a call that fails is judged, as one comparison: CHECK(status == Failed(ErrorCode::kRange,
// "row 3")). One that does not hold shows the error that there was instead.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"

namespace dflash {

// A text with these words somewhere in it: CHECK(reason == Has("is late")).
struct Has {
  std::string words;
};
inline bool operator==(const std::string& text, const Has& has) {
  return text.find(has.words) != std::string::npos;
}
inline std::ostream& operator<<(std::ostream& out, const Has& has) {
  return out << "..." << has.words << "...";
}

// An error of this code, whose message has all these words somewhere in it.
struct Failed {
  template <class... Words>
  explicit Failed(ErrorCode given, Words... all) : code(given), words{std::move(all)...} {}

  ErrorCode code;
  std::vector<std::string> words;
};
inline bool operator==(const Error& error, const Failed& failed) {
  return error.code == failed.code &&
         std::all_of(failed.words.begin(), failed.words.end(),
                     [&](const std::string& words) { return error.message == Has{words}; });
}
template <class T>
bool operator==(const Result<T>& result, const Failed& failed) {
  return !result.ok() && result.error() == failed;
}

inline std::ostream& operator<<(std::ostream& out, const Error& error) {
  return out << "error " << static_cast<int>(error.code) << ": " << error.message;
}
inline std::ostream& operator<<(std::ostream& out, const Failed& failed) {
  out << "error " << static_cast<int>(failed.code) << ":";
  for (const std::string& words : failed.words) out << " ..." << words << "...";
  return out;
}
template <class T>
std::ostream& operator<<(std::ostream& out, const Result<T>& result) {
  return result.ok() ? out << "no error" : out << result.error();
}

}  // namespace dflash
