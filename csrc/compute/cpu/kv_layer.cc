// Stores keys and values into blocks, see kv_layer.h. A block has its keys transposed, as
// [key_size][16 tokens], so that one token's key is spread over the whole block. Rows whose slots
// follow each other in one block are therefore stored together: their values of one element lie
// side by side, within one cache line, and are written at once.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/kv_layer.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/float_mode.h"
#include "base/operator_clock.h"

namespace dflash::compute {
namespace {

// Bounds of a shape, far above any model's; with them no product of sizes exceeds 64 bits.
constexpr uint32_t kMaxBlocks = uint32_t{1} << 27;  // so that a position fits 31 bits
constexpr uint32_t kMaxSize = 4096;

Status check_size(const char* name, uint32_t value, uint32_t most) {
  if (value >= 1 && value <= most) return ok();
  return Error{ErrorCode::kInvalidArgument, std::string(name) + " is " + std::to_string(value) +
                                                "; allowed: 1.." + std::to_string(most)};
}

// Rows that go to consecutive slots of one block.
struct Run {
  size_t first_row, num_rows;
  uint32_t block, offset;
};

Run run_at(std::span<const int64_t> slots, size_t row) {
  const int64_t slot = slots[row];
  Run run{row, 1, static_cast<uint32_t>(slot / kBlockTokens),
          static_cast<uint32_t>(slot % kBlockTokens)};
  while (row + run.num_rows < slots.size() && run.offset + run.num_rows < kBlockTokens &&
         slots[row + run.num_rows] == slot + static_cast<int64_t>(run.num_rows)) {
    ++run.num_rows;
  }
  return run;
}

// Converts the rows of a run into `rounded` [num_rows][width]. Returns the first row that did not
// fit, or run.num_rows.
size_t round_rows(const RowsView& rows, const Run& run, size_t width, Dtype dtype,
                  std::byte* rounded) {
  size_t first_bad = run.num_rows;
  for (size_t i = 0; i < run.num_rows; ++i) {
    if (!convert(rows.dtype, rows.data + (run.first_row + i) * rows.stride_bytes, dtype,
                 rounded + i * width * dtype_bytes(dtype), width)) {
      first_bad = std::min(first_bad, i);
    }
  }
  return first_bad;
}

template <class Element>
void store_keys(const KvShape& shape, const Run& run, const std::byte* rounded, std::byte* to) {
  const size_t width = size_t{shape.num_kv_heads} * shape.key_size;
  const Element* from = reinterpret_cast<const Element*>(rounded);
  for (size_t head = 0; head < shape.num_kv_heads; ++head, from += shape.key_size) {
    Element* at = reinterpret_cast<Element*>(to + shape.key_offset(run.block, head)) + run.offset;
    for (size_t i = 0; i < shape.key_size; ++i, at += kBlockTokens) {
      for (size_t row = 0; row < run.num_rows; ++row) at[row] = from[row * width + i];
    }
  }
}

void store_values(const KvShape& shape, const Run& run, const std::byte* rounded, std::byte* to) {
  const size_t element = dtype_bytes(shape.dtype), bytes = shape.value_size * element;
  const size_t stride = shape.value_stride() * element;
  for (size_t head = 0; head < shape.num_kv_heads; ++head) {
    std::byte* at = to + shape.value_offset(run.block, head) + run.offset * stride;
    for (size_t row = 0; row < run.num_rows; ++row, at += stride)
      std::memcpy(at, rounded + (row * shape.num_kv_heads + head) * bytes, bytes);
  }
}

Error range_error(const char* what, size_t row, Dtype dtype) {
  ErrorPlace place;
  place.token = static_cast<uint32_t>(row);
  return Error{ErrorCode::kRange, "row " + std::to_string(row) + " has a " + what +
                                      " that exceeds the range of " + dtype_name(dtype) +
                                      ", the dtype of the pages; choose another"}
      .at(place);
}

}  // namespace

Result<KvLayer> KvLayer::create(const KvShape& shape) {
  DFLASH_TRY(check_size("num_blocks", shape.num_blocks, kMaxBlocks));
  DFLASH_TRY(check_size("num_kv_heads", shape.num_kv_heads, kMaxSize));
  DFLASH_TRY(check_size("key_size", shape.key_size, kMaxSize));
  DFLASH_TRY(check_size("value_size", shape.value_size, kMaxSize));
  KvLayer layer(shape);
  auto keys = PageBuffer::create(shape.key_bytes());
  if (!keys.ok()) return std::move(keys).error();
  auto values = PageBuffer::create(shape.value_bytes());
  if (!values.ok()) return std::move(values).error();
  layer.keys_ = std::move(keys).value();
  layer.values_ = std::move(values).value();
  return layer;
}

Status KvLayer::append(std::span<const int64_t> slots, const RowsView& keys,
                       const RowsView& values) {
  const OperatorScope scope(Operator::kAppend);
  const int64_t num_slots = int64_t{shape_.num_blocks} * kBlockTokens;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < 0 || slots[i] >= num_slots) {
      return Error{ErrorCode::kInvalidArgument, "row " + std::to_string(i) + " goes to slot " +
                                                    std::to_string(slots[i]) + "; there are " +
                                                    std::to_string(num_slots)};
    }
  }
  if (keys.num_rows != slots.size() || values.num_rows != slots.size())
    return Error{ErrorCode::kInvalidArgument, "slots, keys and values differ in their rows"};
  const CanonicalFloatMode mode;
  const size_t key_width = size_t{shape_.num_kv_heads} * shape_.key_size,
               value_width = size_t{shape_.num_kv_heads} * shape_.value_size;
  std::vector<std::byte> rounded(std::min<size_t>(slots.size(), kBlockTokens) *
                                 std::max(key_width, value_width) * dtype_bytes(shape_.dtype));
  Status status = ok();
  for (size_t row = 0; row < slots.size();) {
    const Run run = run_at(slots, row);
    size_t bad = round_rows(keys, run, key_width, shape_.dtype, rounded.data());
    if (bad < run.num_rows && status.ok()) status = range_error("key", row + bad, shape_.dtype);
    if (shape_.dtype == Dtype::kF32)
      store_keys<uint32_t>(shape_, run, rounded.data(), keys_.data());
    else
      store_keys<uint16_t>(shape_, run, rounded.data(), keys_.data());
    bad = round_rows(values, run, value_width, shape_.dtype, rounded.data());
    if (bad < run.num_rows && status.ok()) status = range_error("value", row + bad, shape_.dtype);
    store_values(shape_, run, rounded.data(), values_.data());
    row += run.num_rows;
  }
  return status;
}

Status KvLayer::copy_block(uint32_t from, uint32_t to) {
  if (from >= shape_.num_blocks || to >= shape_.num_blocks) {
    return Error{ErrorCode::kInvalidArgument, "cannot copy block " + std::to_string(from) + " to " +
                                                  std::to_string(to) + "; there are " +
                                                  std::to_string(shape_.num_blocks)};
  }
  if (from == to) return ok();
  for (size_t head = 0; head < shape_.num_kv_heads; ++head) {
    std::memcpy(keys_.data() + shape_.key_offset(to, head),
                keys_.data() + shape_.key_offset(from, head), shape_.key_block_bytes());
    std::memcpy(values_.data() + shape_.value_offset(to, head),
                values_.data() + shape_.value_offset(from, head), shape_.value_block_bytes());
  }
  return ok();
}

}  // namespace dflash::compute
