// f32-canonical: every instruction set gives the reference's bits, whatever the shape, the dtype,
// the neighbours and the threads.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "compute/cpu/cpu_backend.h"
#include "compute/reference/reference.h"
#include "foreign_float_mode.h"
#include "toy_experts.h"

namespace dflash::compute {
namespace {

using toy::Batch;
using toy::Experts;
using toy::reply_of;
using toy::spec_of;

std::vector<Isa> kernel_sets() {
  std::vector<Isa> sets;
  for (Isa isa : kAllIsas) {
    if (isa != Isa::kReference && isa_is_supported(isa)) sets.push_back(isa);
  }
  return sets;
}

struct Loaded {
  std::unique_ptr<CpuBackend> backend;
  std::unique_ptr<ExpertLayer> layer;
};

Loaded load(Isa isa, uint32_t threads, const Experts& experts, uint32_t count, Dtype resident) {
  Loaded loaded;
  loaded.backend = CpuBackend::create(isa, threads).value();
  loaded.layer = loaded.backend->create_layer(experts.spec(), count, resident).value();
  REQUIRE(experts.load_into(*loaded.layer).ok());
  return loaded;
}

TEST_CASE("every instruction set gives the reference's bits over shapes and dtypes") {
  struct Shape {
    uint32_t in, intermediate, out;
  };
  const Shape shapes[] = {
      {1,   1,   1  },
      {7,   5,   3  },
      {64,  33,  65 },
      {255, 96,  130},
      {256, 64,  64 },
      {257, 300, 71 },
      {600, 31,  515}
  };
  uint32_t seed = 1;
  for (const Shape& shape : shapes) {
    for (Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
      const FfnSpec spec = spec_of(shape.in, shape.intermediate, shape.out);
      const Experts experts(spec, 5, dtype, ++seed);
      const auto reference = make_reference_layer(spec, 5);
      REQUIRE(experts.load_into(*reference).ok());
      Batch batch = Batch::random(spec, 5, 9, 4, ++seed);
      batch.row_dtype = static_cast<Dtype>(seed % 3);
      batch.reply_dtype = static_cast<Dtype>(seed / 3 % 3);
      const std::vector<std::byte> expected = reply_of(*reference, batch);
      for (Isa isa : kernel_sets()) {
        CAPTURE(isa_name(isa));
        CAPTURE(shape.in);
        CAPTURE(dtype_name(dtype));
        CHECK(reply_of(*load(isa, 1, experts, 5, dtype).layer, batch) == expected);
        if (dtype != Dtype::kF32)
          CHECK(reply_of(*load(isa, 1, experts, 5, Dtype::kF32).layer, batch) == expected);
      }
    }
  }
}

TEST_CASE(
    "every number of rows gives the reference's bits, on one expert and spread over several") {
  const FfnSpec spec = spec_of(300, 70, 100);
  const Experts experts(spec, 3, Dtype::kBF16, 5);
  const auto reference = make_reference_layer(spec, 3);
  REQUIRE(experts.load_into(*reference).ok());
  for (Isa isa : kernel_sets()) {
    const Loaded loaded = load(isa, 1, experts, 3, Dtype::kBF16);
    for (uint32_t rows : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 10u, 11u, 12u, 13u, 23u, 37u, 70u}) {
      Batch one = Batch::random(spec, 1, rows, 1, rows);
      one.row_counts.assign(rows, 1);
      one.ids.assign(rows, 1);
      one.weights.assign(rows, 0.75f);
      CHECK(reply_of(*loaded.layer, one) == reply_of(*reference, one));
      const Batch several = Batch::random(spec, 3, rows, 6, rows);
      CHECK(reply_of(*loaded.layer, several) == reply_of(*reference, several));
    }
  }
}

TEST_CASE("every activation, gate and bias gives the reference's bits") {
  uint32_t seed = 100;
  for (int activation = 0; activation <= 7; ++activation) {
    for (int gate = 0; gate <= 2; ++gate) {
      FfnSpec spec = spec_of(40, 50, 60);
      spec.activation = static_cast<Activation>(activation);
      spec.gate = static_cast<GateKind>(gate);
      spec.has_gate_up_bias = ++seed % 2 == 0;
      spec.has_down_bias = seed / 2 % 2 == 0;
      if (spec.gate == GateKind::kClampedSwiglu) spec.alpha = 1.702f, spec.up_offset = 1.0f;
      if (spec.gate != GateKind::kNone && seed % 3 == 0)
        spec.gate_max = 0.5f, spec.up_limit = 0.75f;
      REQUIRE(spec.validate().ok());
      const Experts experts(spec, 2, Dtype::kF16, seed);
      const auto reference = make_reference_layer(spec, 2);
      REQUIRE(experts.load_into(*reference).ok());
      Batch batch = Batch::random(spec, 2, 14, 3, seed);
      for (float& value : batch.rows) value *= 4.0f;  // into the tails of the activations
      const std::vector<std::byte> expected = reply_of(*reference, batch);
      for (Isa isa : kernel_sets())
        CHECK(reply_of(*load(isa, 1, experts, 2, Dtype::kF16).layer, batch) == expected);
    }
  }
}

TEST_CASE("one, two and three threads give the same bits") {
  const FfnSpec spec = spec_of(512, 200, 384);
  const Experts experts(spec, 6, Dtype::kBF16, 9);
  for (Isa isa : kernel_sets()) {
    const Loaded one = load(isa, 1, experts, 6, Dtype::kBF16);
    for (uint32_t threads : {2u, 3u}) {
      const Loaded more = load(isa, threads, experts, 6, Dtype::kBF16);
      for (uint32_t rows : {1u, 5u, 40u}) {
        const Batch batch = Batch::random(spec, 6, rows, 4, rows + threads);
        CHECK(reply_of(*more.layer, batch) == reply_of(*one.layer, batch));
      }
    }
  }
}

TEST_CASE("a row's bits do not depend on the rows beside it") {
  const FfnSpec spec = spec_of(320, 90, 128);
  const Experts experts(spec, 4, Dtype::kF32, 21);
  for (Isa isa : kernel_sets()) {
    const Loaded loaded = load(isa, 1, experts, 4, Dtype::kF32);
    const Batch batch = Batch::random(spec, 4, 30, 4, 22);
    const std::vector<std::byte> together = reply_of(*loaded.layer, batch);
    const size_t row_bytes = 4 * spec.out_size;
    size_t pair = 0;
    for (uint32_t r = 0; r < batch.num_rows(); ++r) {
      Batch alone;
      alone.rows.assign(batch.rows.begin() + r * spec.in_size,
                        batch.rows.begin() + (r + 1) * spec.in_size);
      alone.row_counts = {batch.row_counts[r]};
      alone.ids.assign(batch.ids.begin() + static_cast<long>(pair),
                       batch.ids.begin() + static_cast<long>(pair + batch.row_counts[r]));
      alone.weights.assign(batch.weights.begin() + static_cast<long>(pair),
                           batch.weights.begin() + static_cast<long>(pair + batch.row_counts[r]));
      pair += batch.row_counts[r];
      const std::vector<std::byte> found = reply_of(*loaded.layer, alone);
      REQUIRE(std::memcmp(found.data(), together.data() + r * row_bytes, row_bytes) == 0);
    }
  }
}

TEST_CASE("NaN and infinity stay in their own row, as the one canonical NaN") {
  const FfnSpec spec = spec_of(64, 48, 80);
  const Experts experts(spec, 3, Dtype::kBF16, 31);
  Batch clean = Batch::random(spec, 3, 20, 0, 32);
  clean.row_counts.assign(20, 2);
  for (uint32_t r = 0; r < 20; ++r) {
    for (uint32_t n = 0; n < 2; ++n)
      clean.ids.push_back(static_cast<uint16_t>((r + n) % 3)), clean.weights.push_back(0.5f);
  }
  Batch dirty = clean;
  dirty.rows[3 * 64 + 5] = std::bit_cast<float>(0xffabcdefu);  // a negative NaN with a payload
  dirty.rows[7 * 64 + 1] = std::numeric_limits<float>::infinity();
  dirty.rows[11 * 64 + 9] = std::bit_cast<float>(0x7f800001u);  // signalling
  const auto reference = make_reference_layer(spec, 3);
  REQUIRE(experts.load_into(*reference).ok());
  const std::vector<std::byte> expected = reply_of(*reference, dirty);
  for (Isa isa : kernel_sets()) {
    const Loaded loaded = load(isa, 1, experts, 3, Dtype::kBF16);
    const std::vector<std::byte> found = reply_of(*loaded.layer, dirty),
                                 untouched = reply_of(*loaded.layer, clean);
    CHECK(found == expected);
    for (uint32_t r : {3u, 7u, 11u}) {
      uint32_t bits;
      std::memcpy(&bits, found.data() + r * 80 * 4, 4);
      CHECK(bits == 0x7fc00000u);
    }
    for (uint32_t r = 0; r < 20; ++r) {
      if (r == 3 || r == 7 || r == 11) continue;
      CHECK(std::memcmp(found.data() + r * 320, untouched.data() + r * 320, 320) == 0);
    }
  }
}

TEST_CASE("the caller's floating-point mode changes nothing and comes back") {
  const FfnSpec spec = spec_of(64, 48, 80);
  const Experts experts(spec, 2, Dtype::kF32, 41);
  Batch batch = Batch::random(spec, 2, 6, 2, 42);
  for (float& value : batch.rows) value *= 1e-38f;  // products in the subnormal range
  for (Isa isa : kernel_sets()) {
    const Loaded loaded = load(isa, 2, experts, 2, Dtype::kF32);
    const std::vector<std::byte> expected = reply_of(*loaded.layer, batch);
    for (const unsigned word : kForeignModes) {
      const ForeignFloatMode mode(word);
      const std::vector<std::byte> found = reply_of(*loaded.layer, batch);
      CHECK(float_control() == word);
      CHECK(found == expected);
    }
  }
}

TEST_CASE("a row without experts gets zeros and a batch without rows is fine") {
  const FfnSpec spec = spec_of(16, 16, 40);
  const Experts experts(spec, 2, Dtype::kF32, 51);
  Batch batch = Batch::random(spec, 2, 3, 0, 52);
  for (Isa isa : kernel_sets()) {
    const Loaded loaded = load(isa, 2, experts, 2, Dtype::kF32);
    CHECK(reply_of(*loaded.layer, batch) == std::vector<std::byte>(3 * 40 * 4, std::byte{0}));
    CHECK(reply_of(*loaded.layer, Batch{}).empty());
  }
}

TEST_CASE("the result is within the derived bound of float64") {
  FfnSpec spec = spec_of(512, 256, 200);
  spec.has_gate_up_bias = spec.has_down_bias = true;
  const Experts experts(spec, 4, Dtype::kBF16, 61);
  const Batch batch = Batch::random(spec, 4, 24, 4, 62);
  const Loaded loaded = load(best_isa(), 1, experts, 4, Dtype::kBF16);
  const std::vector<std::byte> bytes = reply_of(*loaded.layer, batch);
  const std::vector<std::byte> encoded = toy::encode(batch.row_dtype, batch.rows);
  std::vector<std::byte> unused(bytes.size());
  const std::vector<double> exact =
      forward_float64(spec, experts.all_weights(), batch.args(encoded, unused));
  // A chain of n fmas errs by at most n u sum|a_i b_i| (Higham, section 3.1); with unit rows and
  // weights of scale 1/sqrt(K) the sum is <= |w| |x| ~ sqrt(K) * max. Twice (up, down) and 4 pairs
  // a row: 4 * 2 * 256 * 2^-24 * scale bounds every element.
  const double scale = std::sqrt(512.0);
  const double bound = 4 * 2 * 256 * std::ldexp(1.0, -24) * scale;
  double worst = 0, power = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    float found;
    std::memcpy(&found, bytes.data() + 4 * i, 4);
    worst = std::max(worst, std::fabs(static_cast<double>(found) - exact[i]));
    power += exact[i] * exact[i];
  }
  const double rms = std::sqrt(power / static_cast<double>(exact.size()));
  CHECK(worst <= bound);
  // rounding errors are random, so the real figure is far below the bound
  CHECK(worst <= 1e-5 * rms);
}

}  // namespace
}  // namespace dflash::compute
