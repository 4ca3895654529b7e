// Keys and values of a layer: where they are stored, how they are rounded, what is refused.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include "base/dtype.h"
#include "compute/paged_rows.h"
#include "failed.h"

namespace dflash::compute {
namespace {

uint16_t element(const std::byte* at, size_t index) {
  uint16_t bits;
  std::memcpy(&bits, at + index * sizeof(bits), sizeof(bits));
  return bits;
}

TEST_CASE("kv layer: keys are transposed, values padded, and both rounded once to nearest even") {
  PagedCase layer{2, 2, 5, 7, Dtype::kBF16};
  const Tokens tokens(layer, 40, 3);
  KvLayer kv = KvLayer::create({4, 2, 5, 7, Dtype::kBF16}).value();
  CHECK(kv.num_bytes() == 4 * 2 * 16 * (5 + 16) * 2);
  // runs that end with a block, with a gap, and one backwards
  std::vector<int64_t> slots;
  for (int64_t i = 0; i < 25; ++i) slots.push_back(9 + i);
  for (int64_t i = 0; i < 15; ++i) slots.push_back(63 - 2 * i);
  CHECK(kv.append(slots, view_of(tokens.keys, 0, 40, 10), view_of(tokens.values, 0, 40, 14)).ok());
  const KvView view = kv.view();
  for (size_t row = 0; row < 40; ++row) {
    const uint32_t block = static_cast<uint32_t>(slots[row] / 16),
                   t = static_cast<uint32_t>(slots[row] % 16);
    for (uint32_t head = 0; head < 2; ++head) {
      for (size_t i = 0; i < 5; ++i) {
        CHECK(element(view.key_block(block, head), i * 16 + t) ==
              f32_to_bf16(tokens.keys[row * 10 + head * 5 + i]));
      }
      for (size_t i = 0; i < 7; ++i) {
        CHECK(element(view.value_block(block, head), t * 16 + i) ==
              f32_to_bf16(tokens.values[row * 14 + head * 7 + i]));
      }
    }
  }
}

TEST_CASE(
    "kv layer: a finite value that becomes infinite fails naming the row, infinities do not") {
  PagedCase layer{1, 1, 4, 4, Dtype::kF16};
  Tokens tokens(layer, 20, 3);
  KvLayer kv = KvLayer::create({2, 1, 4, 4, Dtype::kF16}).value();
  std::vector<int64_t> slots;
  for (int64_t i = 0; i < 20; ++i) slots.push_back(i);
  tokens.keys[5] = std::numeric_limits<float>::infinity();
  CHECK(kv.append(slots, view_of(tokens.keys, 0, 20, 4), view_of(tokens.values, 0, 20, 4)).ok());
  tokens.values[18 * 4] = 65520.0f;
  CHECK(kv.append(slots, view_of(tokens.keys, 0, 20, 4), view_of(tokens.values, 0, 20, 4)) ==
        Failed(ErrorCode::kRange, "row 18 has a value that exceeds the range of f16"));
}

TEST_CASE("kv layer: sizes, slots and blocks that do not exist are refused before any is written") {
  CHECK(KvLayer::create({0, 1, 4, 4, Dtype::kF16}).error().message ==
        "num_blocks is 0; allowed: 1..134217728");
  CHECK_FALSE(KvLayer::create({1, 1, 5000, 4, Dtype::kF16}).ok());
  PagedCase layer{1, 1, 4, 4, Dtype::kF32};
  const Tokens tokens(layer, 2, 3);
  KvLayer kv = KvLayer::create({2, 1, 4, 4, Dtype::kF32}).value();
  const RowsView keys = view_of(tokens.keys, 0, 2, 4), values = view_of(tokens.values, 0, 2, 4);
  for (int64_t bad : {int64_t{-1}, int64_t{32}, std::numeric_limits<int64_t>::min()}) {
    const std::vector<int64_t> slots = {0, bad};
    CHECK(kv.append(slots, keys, values).error().message ==
          "row 1 goes to slot " + std::to_string(bad) + "; there are 32");
    CHECK(element(kv.view().keys, 0) == 0);
  }
  const std::vector<int64_t> one = {0};
  CHECK_FALSE(kv.append(one, keys, values).ok());
  CHECK_FALSE(kv.copy_block(0, 2).ok());
  CHECK(kv.copy_block(1, 1).ok());
}

}  // namespace
}  // namespace dflash::compute
