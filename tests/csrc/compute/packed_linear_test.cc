// The packed linear layer gives the bits of its twin, whatever the format, the class, the kernel
// set, the threads, the number of rows and where rows lie.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/packed_linear.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

#include "compute/formats/dequantize.h"
#include "compute/reference/row_operators.h"
#include "failed.h"
#include "twins.h"

namespace dflash::compute {
namespace {

using toy::kernel_sets;
using toy::StoredExperts;

struct FormatCase {
  WeightFormat stored, resident;
};
std::vector<FormatCase> formats() {
  std::vector<FormatCase> found;
  for (uint8_t value = 0; value < kNumWeightFormats; ++value) {
    const auto format = static_cast<WeightFormat>(value);
    if (has_panels(format)) found.push_back({toy::source_of(format), format});
  }
  return found;
}

// The classes of processors that some kernel set here computes.
std::vector<NumericsClass> classes() {
  std::vector<NumericsClass> found;
  for (const NumericsFacts& facts : numerics_table()) {
    if (kernel_set(best_isa(), facts.numerics) != nullptr) found.push_back(facts.numerics);
  }
  return found;
}

// Weights of one part with a bias; the parts' own memory outlives them.
class Weights {
 public:
  Weights(FormatCase format, uint32_t outputs, uint32_t inputs, uint32_t seed)
      : resident_(format.resident),
        experts_(toy::spec_of(inputs, outputs, 32), 1, format.stored, WeightFormat::kF32, seed),
        outputs_(outputs) {
    std::mt19937 random(seed);
    bias_ = toy::encode(Dtype::kBF16, toy::random_floats(random, outputs, 0.2f));
  }
  LinearPart part(bool has_bias, uint32_t input_column = 0) const {
    LinearPart found;
    found.matrix = experts_.weights(0).gate;
    if (has_bias) found.bias = {bias_.data(), Dtype::kBF16, outputs_, 1};
    found.input_column = input_column;
    found.resident = resident_;
    return found;
  }

 private:
  WeightFormat resident_;
  StoredExperts experts_;
  uint32_t outputs_;
  std::vector<std::byte> bias_;
};

// Rows with a gap behind each, and room for the output likewise.
struct Rows {
  uint32_t num_rows;
  Dtype dtype, out_dtype;
  size_t stride, out_stride;
  std::vector<std::byte> bytes, residual;

  Rows(uint32_t rows, uint32_t width, uint32_t outputs, Dtype from, Dtype to, uint32_t seed)
      : num_rows(rows),
        dtype(from),
        out_dtype(to),
        stride((width + 3) * dtype_bytes(from)),
        out_stride((outputs + 5) * dtype_bytes(to)) {
    std::mt19937 random(seed);
    bytes = toy::encode(from, toy::random_floats(random, size_t{rows} * (width + 3), 1.0f));
    residual = toy::encode(to, toy::random_floats(random, size_t{rows} * (outputs + 5), 1.0f));
  }
  RowsView view() const { return {bytes.data(), dtype, stride, num_rows}; }
  RowsView residual_view() const { return {residual.data(), out_dtype, out_stride, num_rows}; }

  template <class Compute>  // compute(rows, out, residual) -> Status
  std::vector<std::byte> outputs(bool has_residual, const Compute& compute) const {
    std::vector<std::byte> out(num_rows * out_stride, std::byte{0xee});
    const RowsView added = residual_view();
    const Status status = compute(view(), RowsTarget{out.data(), out_dtype, out_stride},
                                  has_residual ? &added : nullptr);
    REQUIRE_MESSAGE(status.ok(), (status.ok() ? "" : status.error().message));
    return out;
  }
  std::vector<std::byte> of(const PackedLinear& linear, uint32_t threads, bool has_residual) const {
    const auto pool = ThreadPool::create(threads, {}, 0).value();
    ScratchBlock scratch;
    return outputs(has_residual,
                   [&](const RowsView& in, const RowsTarget& to, const RowsView* add) {
                     return linear.run(*pool, scratch, in, to, add);
                   });
  }
  std::vector<std::byte> of_twin(std::span<const LinearPart> parts, NumericsClass numerics,
                                 bool has_residual) const {
    return outputs(has_residual,
                   [&](const RowsView& in, const RowsTarget& to, const RowsView* add) {
                     return reference_linear(parts, numerics, in, to, add);
                   });
  }
};

PackedLinear packed(std::span<const LinearPart> parts, NumericsClass numerics, Isa isa) {
  PageArena arena;  // whose pages stay as long as the layer
  YieldingProgress progress;
  auto linear = PackedLinear::create(parts, numerics, isa, arena, progress);
  REQUIRE_MESSAGE(linear.ok(), (linear.ok() ? "" : linear.error().message));
  return std::move(linear).value();
}

TEST_CASE("linear: every kernel set and class gives the twin's bits in every format") {
  uint32_t seed = 1;
  for (const FormatCase& format : formats()) {
    const uint32_t inputs = toy::uneven_spec_of(format.resident).in_size;
    const Weights weights(format, 71, inputs, ++seed);
    const LinearPart part = weights.part(true);
    for (NumericsClass numerics : classes()) {
      for (uint32_t num_rows : {1u, 3u, 17u}) {
        const Rows rows(num_rows, inputs, 71, static_cast<Dtype>(seed % 3),
                        static_cast<Dtype>(num_rows % 3), seed + num_rows);
        const auto expected = rows.of_twin({&part, 1}, numerics, false);
        for (Isa isa : kernel_sets()) {
          if (kernel_set(isa, numerics) == nullptr) continue;
          CAPTURE(isa_name(isa));
          CAPTURE(numerics_name(numerics));
          CAPTURE(format_name(format.resident));
          CHECK(rows.of(packed({&part, 1}, numerics, isa), 1, false) == expected);
        }
      }
    }
  }
}

TEST_CASE("linear: any number of rows, threads and parts gives the twin's bits") {
  const Weights first({WeightFormat::kBF16, WeightFormat::kBF16}, 300, 320, 1),
      second({WeightFormat::kQ8_0, WeightFormat::kQ8_0}, 33, 320, 2),
      third({WeightFormat::kF32, WeightFormat::kInt8G32}, 100, 320, 3);
  const LinearPart parts[] = {first.part(true), second.part(false, 5), third.part(true, 64),
                              first.part(false, 5)};
  constexpr uint32_t kOutputs = 300 + 33 + 100 + 300;
  for (NumericsClass numerics : classes()) {
    for (uint32_t num_rows : {1u, 2u, 4u, 5u, 8u, 12u, 16u, 31u, 32u, 33u, 97u, 200u}) {
      const Rows rows(num_rows, 320 + 64, kOutputs, Dtype::kBF16, Dtype::kF32, num_rows);
      const auto expected = rows.of_twin(parts, numerics, true);
      for (Isa isa : kernel_sets()) {
        if (kernel_set(isa, numerics) == nullptr) continue;
        const PackedLinear linear = packed(parts, numerics, isa);
        for (uint32_t threads : {1u, 2u, 3u}) {
          CAPTURE(isa_name(isa));
          CAPTURE(numerics_name(numerics));
          CAPTURE(num_rows);
          CHECK(rows.of(linear, threads, true) == expected);
        }
      }
    }
  }
}

TEST_CASE("linear: a row's bits do not depend on the rows beside it") {
  const Weights weights({WeightFormat::kQ4K, WeightFormat::kQ4K}, 130, 512, 4);
  const LinearPart part = weights.part(true);
  for (NumericsClass numerics : classes()) {
    const PackedLinear linear = packed({&part, 1}, numerics, best_isa());
    const Rows rows(31, 512, 130, Dtype::kF16, Dtype::kBF16, 5);
    const auto together = rows.of(linear, 2, false);
    for (uint32_t r = 0; r < rows.num_rows; ++r) {
      Rows alone = rows;
      alone.num_rows = 1;
      alone.bytes.erase(alone.bytes.begin(),
                        alone.bytes.begin() + static_cast<long>(r * rows.stride));
      const auto found = alone.of(linear, 1, false);
      REQUIRE(std::memcmp(found.data(), together.data() + r * rows.out_stride, 130 * 2) == 0);
    }
  }
}

TEST_CASE("linear: several layers at once give the bits of each alone") {
  const Weights wide({WeightFormat::kBF16, WeightFormat::kBF16}, 700, 96, 14),
      narrow({WeightFormat::kQ8_0, WeightFormat::kQ8_0}, 33, 96, 15),
      one({WeightFormat::kF32, WeightFormat::kF32}, 1, 64, 16);
  for (NumericsClass numerics : classes()) {
    const LinearPart parts[] = {wide.part(true), narrow.part(false), one.part(true, 7)};
    const PackedLinear linears[] = {packed({&parts[0], 1}, numerics, best_isa()),
                                    packed({&parts[1], 1}, numerics, best_isa()),
                                    packed({&parts[2], 1}, numerics, best_isa())};
    for (uint32_t num_rows : {1U, 9U, 120U}) {
      const Rows rows(num_rows, 96, 700, Dtype::kBF16, Dtype::kF32, 17);
      const RowsView in = rows.view(), added = rows.residual_view();
      for (uint32_t threads : {1U, 3U}) {
        const auto pool = ThreadPool::create(threads, {}, 0).value();
        ScratchBlock scratch;
        std::vector<std::vector<std::byte>> outs(
            3, std::vector<std::byte>(num_rows * rows.out_stride, std::byte{0xee}));
        std::vector<LinearProduct> products;
        for (size_t i = 0; i < 3; ++i) {
          products.push_back({
              &linears[i],
              {outs[i].data(), Dtype::kF32, rows.out_stride},
              i == 0 ? &added : nullptr
          });
        }
        REQUIRE(PackedLinear::run_together(*pool, scratch, in, products).ok());
        for (size_t i = 0; i < 3; ++i) CHECK(outs[i] == rows.of(linears[i], 1, i == 0));
      }
    }
  }
  const auto pool = ThreadPool::create(1, {}, 0).value();
  ScratchBlock scratch;
  CHECK(PackedLinear::run_together(*pool, scratch, RowsView{}, {}).ok());
}

TEST_CASE("linear: of several layers the first that overflows is told of") {
  const Weights weights({WeightFormat::kF32, WeightFormat::kF32}, 4, 64, 18);
  const LinearPart part = weights.part(false);
  const PackedLinear linear = packed({&part, 1}, NumericsClass::kF32Canonical, best_isa());
  const std::vector<float> values(64, 1e9F);
  const RowsView in{reinterpret_cast<const std::byte*>(values.data()), Dtype::kF32, 256, 1};
  std::vector<std::byte> wide(16), narrow(8);
  const LinearProduct products[] = {
      {&linear, {wide.data(), Dtype::kF32, 16} },
      {&linear, {narrow.data(), Dtype::kF16, 8}}
  };
  const auto pool = ThreadPool::create(2, {}, 0).value();
  ScratchBlock scratch;
  const Status status = PackedLinear::run_together(*pool, scratch, in, products);
  CHECK(status == Failed(ErrorCode::kRange));
  CHECK(std::any_of(wide.begin(), wide.end(), [](std::byte b) { return b != std::byte{0}; }));
}

TEST_CASE("linear: a part whose format the class does not take is computed by the default class") {
  const Weights taken({WeightFormat::kQ4_0, WeightFormat::kQ4_0}, 40, 64, 6),
      not_taken({WeightFormat::kBF16, WeightFormat::kBF16}, 40, 64, 7);
  const LinearPart parts[] = {taken.part(false), not_taken.part(false)};
  const PackedLinear linear = packed(parts, NumericsClass::kInt8Groups, best_isa());
  CHECK(linear.numerics(0) == NumericsClass::kInt8Groups);
  CHECK(linear.numerics(1) == NumericsClass::kF32Canonical);
  CHECK(linear.format(0) == WeightFormat::kQ4_0);
  CHECK(linear.format(1) == WeightFormat::kBF16);
  CHECK(linear.outputs() == 80);
  CHECK(linear.inputs() == 64);
  CHECK(linear.row_width() == 64);
  CHECK(linear.resident_bytes() >= 40 * 64 * 2 + 40 * 36);
}

TEST_CASE("linear: a residual may be the output's own memory") {
  const Weights weights({WeightFormat::kBF16, WeightFormat::kBF16}, 90, 96, 8);
  const LinearPart part = weights.part(true);
  const PackedLinear linear = packed({&part, 1}, kDefaultNumerics, best_isa());
  const auto pool = ThreadPool::create(2, {}, 0).value();
  for (uint32_t num_rows : {2u, 50u}) {
    const Rows rows(num_rows, 96, 90, Dtype::kBF16, Dtype::kBF16, 9);
    std::vector<std::byte> in_place = rows.residual;
    ScratchBlock scratch;
    const RowsView residual{in_place.data(), Dtype::kBF16, rows.out_stride, num_rows};
    REQUIRE(linear
                .run(*pool, scratch, rows.view(), {in_place.data(), Dtype::kBF16, rows.out_stride},
                     &residual)
                .ok());
    const auto expected = rows.of(linear, 1, true);
    for (uint32_t r = 0; r < num_rows; ++r) {
      const size_t at = r * rows.out_stride;
      CHECK(std::memcmp(in_place.data() + at, expected.data() + at, 90 * 2) == 0);
      // Nothing is written behind a row.
      CHECK(std::memcmp(in_place.data() + at + 180, rows.residual.data() + at + 180, 10) == 0);
    }
  }
}

TEST_CASE("linear: rows beyond the scratch are computed in portions") {
  const Weights weights({WeightFormat::kF32, WeightFormat::kF32}, 7, 16, 10);
  // A row of four million inputs takes 16 MB of scratch; the rows overlap in memory.
  const LinearPart part = weights.part(false, 4'000'000);
  const PackedLinear linear = packed({&part, 1}, kDefaultNumerics, best_isa());
  std::mt19937 random(11);
  std::vector<std::byte> bytes(2 * size_t{4'000'100});
  const auto values = toy::encode(Dtype::kBF16, toy::random_floats(random, 100, 1.0f));
  std::memcpy(bytes.data() + 8'000'000, values.data(), values.size());
  const RowsView rows{bytes.data(), Dtype::kBF16, 2, 9};
  const auto pool = ThreadPool::create(2, {}, 0).value();
  ScratchBlock scratch;
  std::vector<float> found(9 * 7), expected(9 * 7);
  const auto target = [](std::vector<float>& to) {
    return RowsTarget{reinterpret_cast<std::byte*>(to.data()), Dtype::kF32, 28};
  };
  REQUIRE(linear.run(*pool, scratch, rows, target(found)).ok());
  REQUIRE(reference_linear({&part, 1}, kDefaultNumerics, rows, target(expected)).ok());
  CHECK(found == expected);
}

TEST_CASE("linear: NaN is canonical and stays in its row, and so does infinity") {
  const Weights weights({WeightFormat::kBF16, WeightFormat::kBF16}, 80, 64, 12);
  const LinearPart part = weights.part(true);
  for (NumericsClass numerics : classes()) {
    Rows rows(20, 64, 80, Dtype::kF32, Dtype::kF32, 13);
    const uint32_t nan = 0xffabcdefu, infinity = 0x7f800000u;
    std::memcpy(rows.bytes.data() + 3 * rows.stride + 20, &nan, 4);
    std::memcpy(rows.bytes.data() + 7 * rows.stride, &infinity, 4);
    std::memcpy(rows.residual.data() + 11 * rows.out_stride + 4, &nan, 4);
    const auto expected = rows.of_twin({&part, 1}, numerics, true);
    for (Isa isa : kernel_sets()) {
      if (kernel_set(isa, numerics) == nullptr) continue;
      CHECK(rows.of(packed({&part, 1}, numerics, isa), 2, true) == expected);
    }
    uint32_t bits;
    std::memcpy(&bits, expected.data() + 11 * rows.out_stride + 4, 4);
    CHECK(bits == 0x7fc00000u);
  }
}

TEST_CASE("linear: a value that only the output's dtype cannot hold is an error, the first named") {
  const Weights weights({WeightFormat::kF32, WeightFormat::kF32}, 70, 64, 14);
  const LinearPart part = weights.part(false);
  Rows rows(40, 64, 70, Dtype::kF32, Dtype::kF16, 15);
  for (uint32_t r : {21u, 30u}) {
    for (uint32_t k = 0; k < 64; ++k) {
      const float large = 1e7f;
      std::memcpy(rows.bytes.data() + r * rows.stride + 4 * k, &large, 4);
    }
  }
  std::vector<std::byte> out(40 * rows.out_stride);
  const RowsTarget target{out.data(), Dtype::kF16, rows.out_stride};
  const Status expected = reference_linear({&part, 1}, kDefaultNumerics, rows.view(), target);
  REQUIRE(expected == Failed(ErrorCode::kRange, "row 21, column 0"));
  for (uint32_t threads : {1u, 3u}) {
    const auto pool = ThreadPool::create(threads, {}, 0).value();
    ScratchBlock scratch;
    const Status found =
        packed({&part, 1}, kDefaultNumerics, best_isa()).run(*pool, scratch, rows.view(), target);
    CHECK(found == Failed(ErrorCode::kRange, expected.error().message));
  }
}

TEST_CASE("linear: gathered outputs are the stored weights, in every format and class") {
  uint32_t seed = 100;
  const auto pool = ThreadPool::create(2, {}, 0).value();
  for (const FormatCase& format : formats()) {
    const uint32_t inputs = toy::uneven_spec_of(format.resident).in_size;
    const Weights weights(format, 71, inputs, ++seed), more(format, 9, inputs, ++seed);
    const LinearPart parts[] = {weights.part(true), more.part(false)};
    std::vector<float> expected(size_t{80} * inputs), found(expected.size());
    dequantize(parts[0].matrix, 0, 71, expected.data());
    dequantize(parts[1].matrix, 0, 9, expected.data() + size_t{71} * inputs);
    std::vector<int64_t> ids(80);
    for (uint32_t o = 0; o < 80; ++o) {
      ids[o] = o;
      if (!format_facts(format.resident).is_stored)
        requantize_row(format.resident, &expected[size_t{o} * inputs], inputs);
    }
    for (NumericsClass numerics : classes()) {
      for (Isa isa : kernel_sets()) {
        if (kernel_set(isa, numerics) == nullptr) continue;
        CAPTURE(isa_name(isa));
        CAPTURE(format_name(format.resident));
        const RowsTarget target{reinterpret_cast<std::byte*>(found.data()), Dtype::kF32,
                                4 * size_t{inputs}};
        REQUIRE(packed(parts, numerics, isa).gather(*pool, ids, target).ok());
        CHECK(std::memcmp(found.data(), expected.data(), 4 * found.size()) == 0);
      }
    }
  }
}

TEST_CASE("linear: gather takes ids in any order and refuses those that are not there") {
  const Weights weights({WeightFormat::kBF16, WeightFormat::kBF16}, 50, 24, 16);
  const LinearPart part = weights.part(false);
  const PackedLinear linear = packed({&part, 1}, kDefaultNumerics, best_isa());
  const auto pool = ThreadPool::create(1, {}, 0).value();
  const int64_t ids[] = {49, 0, 49, 7, 33};
  std::vector<std::byte> out(5 * 60, std::byte{0xee});
  REQUIRE(linear.gather(*pool, ids, {out.data(), Dtype::kBF16, 60}).ok());
  for (size_t i = 0; i < 5; ++i) {
    CHECK(std::memcmp(out.data() + 60 * i, part.matrix.data + 48 * ids[i], 48) == 0);
    CHECK(out[60 * i + 48] == std::byte{0xee});
  }
  for (int64_t wrong : {int64_t{-1}, int64_t{50}}) {
    CHECK(linear.gather(*pool, {&wrong, 1}, {out.data(), Dtype::kBF16, 60}) ==
          Failed(ErrorCode::kInvalidArgument));
  }
}

TEST_CASE("linear: two threads may use one pool and one layer at a time") {
  const Weights weights({WeightFormat::kBF16, WeightFormat::kBF16}, 200, 128, 17);
  const LinearPart part = weights.part(true);
  const PackedLinear linear = packed({&part, 1}, kDefaultNumerics, best_isa());
  const Rows rows(30, 128, 200, Dtype::kBF16, Dtype::kF32, 18);
  const auto expected = rows.of(linear, 1, false);
  const auto pool = ThreadPool::create(2, {}, 0).value();
  const auto repeat = [&](bool& is_equal) {
    ScratchBlock scratch;
    for (int round = 0; round < 30; ++round) {
      std::vector<std::byte> out(expected.size(), std::byte{0xee});
      is_equal &=
          linear.run(*pool, scratch, rows.view(), {out.data(), rows.out_dtype, rows.out_stride})
              .ok() &&
          out == expected;
    }
  };
  bool are_equal[2] = {true, true};
  std::thread other([&] { repeat(are_equal[1]); });
  repeat(are_equal[0]);
  other.join();
  CHECK(are_equal[0]);
  CHECK(are_equal[1]);
}

TEST_CASE("linear: the result is within the derived bound of float64") {
  constexpr uint32_t kInputs = 1024, kOutputs = 96, kRows = 6;
  const Weights weights({WeightFormat::kF32, WeightFormat::kF32}, kOutputs, kInputs, 19);
  const LinearPart part = weights.part(false);
  const Rows rows(kRows, kInputs, kOutputs, Dtype::kF32, Dtype::kF32, 20);
  const auto found = rows.of(packed({&part, 1}, kDefaultNumerics, best_isa()), 1, false);
  const auto* matrix = reinterpret_cast<const float*>(part.matrix.data);
  for (uint32_t r = 0; r < kRows; ++r) {
    const auto* row = reinterpret_cast<const float*>(rows.bytes.data() + r * rows.stride);
    const auto* out = reinterpret_cast<const float*>(found.data() + r * rows.out_stride);
    for (uint32_t o = 0; o < kOutputs; ++o) {
      double exact = 0.0, size = 0.0;
      for (uint32_t k = 0; k < kInputs; ++k) {
        const double product = static_cast<double>(matrix[o * kInputs + k]) * double{row[k]};
        exact += product;
        size += std::fabs(product);
      }
      // Chains of 256 fmas and the sums of four of them: 260 roundings at most (Higham, section
      // 3.1).
      CHECK(std::fabs(double{out[o]} - exact) <= 260 * 0x1p-24 * size);
    }
  }
}

TEST_CASE("linear: wrong parts and calls are refused") {
  const Weights weights({WeightFormat::kBF16, WeightFormat::kBF16}, 50, 24, 21),
      other({WeightFormat::kBF16, WeightFormat::kBF16}, 50, 32, 22);
  PageArena arena;
  YieldingProgress progress;
  const auto create = [&](std::span<const LinearPart> parts) {
    return PackedLinear::create(parts, kDefaultNumerics, best_isa(), arena, progress);
  };
  CHECK(create({}) == Failed(ErrorCode::kInvalidArgument));
  const LinearPart unequal[] = {weights.part(false), other.part(false)};
  CHECK(create(unequal) == Failed(ErrorCode::kInvalidArgument));
  LinearPart part = weights.part(true);
  part.bias.count = 49;
  CHECK(create({&part, 1}) == Failed(ErrorCode::kInvalidArgument));
  part = weights.part(false);
  part.resident = WeightFormat::kF16;
  CHECK(create({&part, 1}) == Failed(ErrorCode::kUnsupported));
  part = weights.part(false);
  part.input_column = UINT32_MAX - 3;
  CHECK(create({&part, 1}) == Failed(ErrorCode::kInvalidArgument));
  part = weights.part(false);
  CHECK(PackedLinear::create({&part, 1}, NumericsClass::kBf16Mma, Isa::kScalar, arena, progress) ==
        Failed(ErrorCode::kUnsupported));
  const PackedLinear linear = packed({&part, 1}, kDefaultNumerics, best_isa());
  const auto pool = ThreadPool::create(1, {}, 0).value();
  ScratchBlock scratch;
  CHECK(linear.run(*pool, scratch, {}, {}).ok());
  CHECK_FALSE(linear.run(*pool, scratch, {nullptr, Dtype::kF32, 96, 1}, {}).ok());
}

}  // namespace
}  // namespace dflash::compute
