// Rows are copied and gathered as they are, into rows that lie apart, and an id that is not there
// changes nothing.
// SPDX-License-Identifier: Apache-2.0
#include "compute/operators/row_copies.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

namespace dflash::compute {
namespace {

constexpr size_t kStride = 7, kRowBytes = 5, kNumRows = 4, kOutStride = 6;

std::vector<std::byte> numbered(size_t count) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i + 1);
  return bytes;
}

// Checks that row `row` of `out` is row `id` of `table`, and that the gap behind it is empty.
void check_row(const std::vector<std::byte>& out, size_t row, const std::vector<std::byte>& table,
               size_t id) {
  for (size_t i = 0; i < kRowBytes; ++i)
    CHECK(out[row * kOutStride + i] == table[id * kStride + i]);
  CHECK(out[row * kOutStride + kRowBytes] == std::byte{0});
}

TEST_CASE("rows are copied without what lies between them") {
  const std::vector<std::byte> table = numbered(kNumRows * kStride);
  std::vector<std::byte> out(kNumRows * kOutStride);
  copy_rows({table.data(), kStride, kRowBytes, kNumRows}, out.data(), kOutStride);
  for (size_t row = 0; row < kNumRows; ++row) check_row(out, row, table, row);
}

TEST_CASE("gathered rows are those that ids name, and none where one is not there") {
  const std::vector<std::byte> table = numbered(kNumRows * kStride);
  const ByteRows rows{table.data(), kStride, kRowBytes, kNumRows};
  const std::vector<int64_t> ids = {3, 0, 3};
  std::vector<std::byte> out(ids.size() * kOutStride);
  REQUIRE(gather_rows("token id", rows, ids, out.data(), kOutStride).ok());
  for (size_t row = 0; row < ids.size(); ++row)
    check_row(out, row, table, static_cast<size_t>(ids[row]));
  for (const int64_t outside : {int64_t{-1}, int64_t{kNumRows}}) {
    std::vector<std::byte> untouched(ids.size() * kOutStride);
    const std::vector<int64_t> wrong = {1, outside, 2};
    const Status status = gather_rows("token id", rows, wrong, untouched.data(), kOutStride);
    REQUIRE_FALSE(status.ok());
    CHECK(status.error().code == ErrorCode::kInvalidArgument);
    CHECK(untouched == std::vector<std::byte>(untouched.size()));
  }
}

}  // namespace
}  // namespace dflash::compute
