// bf16-dot: the scalar twin of VDPBF16PS has the processor's bits, and the kernels have the twin's over shapes, rows, threads and specials.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "compute/cpu/bf16_pack.h"
#include "compute/cpu/cpu_backend.h"
#include "compute/cpu/pack.h"
#include "compute/reference/bf16_dot.h"
#include "compute/reference/reference.h"
#include "toy_experts.h"

namespace dflash::compute {
namespace {

using toy::Batch;
using toy::Experts;

constexpr NumericsClass kClass = NumericsClass::kBf16Dot;

bool is_available() { return isa_is_supported(Isa::kAvx512Bf16); }

struct Loaded {
  std::unique_ptr<CpuBackend> backend;
  std::unique_ptr<ExpertLayer> layer;
};

Loaded load(Isa isa, uint32_t threads, const Experts& experts, uint32_t count) {
  Loaded loaded;
  loaded.backend = CpuBackend::create(isa, threads).value();
  loaded.layer = loaded.backend->create_layer(experts.spec(), count, WeightFormat::kBF16, kClass).value();
  REQUIRE(experts.load_into(*loaded.layer).ok());
  return loaded;
}

std::vector<std::byte> reply_of(ExpertLayer& layer, const Batch& batch) {
  std::vector<std::byte> reply;
  const Status status = batch.run(layer, reply);
  REQUIRE_MESSAGE(status.ok(), (status.ok() ? "" : status.error().message));
  return reply;
}

FfnSpec spec_of(uint32_t in, uint32_t intermediate, uint32_t out) {
  FfnSpec spec;
  spec.in_size = in;
  spec.intermediate_size = intermediate;
  spec.out_size = out;
  return spec;
}

TEST_CASE("bf16-dot: kernels give the twin's bits over shapes and dtypes of rows") {
  if (!is_available()) return;
  struct Shape { uint32_t in, intermediate, out; };
  const Shape shapes[] = {{1, 1, 1}, {7, 5, 3}, {64, 33, 65}, {255, 96, 130}, {256, 64, 64}, {257, 300, 71}, {600, 31, 515}, {513, 511, 40}};
  uint32_t seed = 1;
  for (const Shape& shape : shapes) {
    for (Dtype row_dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
      const Experts experts(spec_of(shape.in, shape.intermediate, shape.out), 5, Dtype::kBF16, ++seed);
      Batch batch = Batch::random(experts.spec(), 5, 9, 4, ++seed);
      batch.row_dtype = row_dtype;
      batch.reply_dtype = static_cast<Dtype>(seed / 3 % 3);
      CAPTURE(shape.in);
      CHECK(reply_of(*load(Isa::kAvx512Bf16, 1, experts, 5).layer, batch) == reply_of(*load(Isa::kReference, 1, experts, 5).layer, batch));
    }
  }
}

}  // namespace
}  // namespace dflash::compute
