// int8-groups: the kernels of every instruction set have the twin's bits over formats, shapes,
// rows, threads and special values.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "compute/cpu/cpu_backend.h"
#include "compute/reference/int8_groups.h"
#include "compute/reference/reference.h"
#include "stored_experts.h"

namespace dflash::compute {
namespace {

using toy::Batch;
using toy::reply_of;
using toy::spec_of;
using toy::StoredExperts;

constexpr NumericsClass kClass = NumericsClass::kInt8Groups;

struct FormatCase {
  WeightFormat stored, resident;
};
constexpr FormatCase kCases[] = {
    {WeightFormat::kBF16,      WeightFormat::kInt8G32  },
    {WeightFormat::kF16,       WeightFormat::kInt4G32  },
    {WeightFormat::kMxfp4,     WeightFormat::kMxfp4    },
    {WeightFormat::kQ8_0,      WeightFormat::kQ8_0     },
    {WeightFormat::kQ4_0,      WeightFormat::kQ4_0     },
    {WeightFormat::kQ4K,       WeightFormat::kQ4K      },
    {WeightFormat::kQ5K,       WeightFormat::kQ5K      },
    {WeightFormat::kQ6K,       WeightFormat::kQ6K      },
    {WeightFormat::kGgufMxfp4, WeightFormat::kGgufMxfp4},
    {WeightFormat::kIq4Nl,     WeightFormat::kIq4Nl    },
    {WeightFormat::kIq4Xs,     WeightFormat::kIq4Xs    },
    {WeightFormat::kQ4_1,      WeightFormat::kQ4_1     },
    {WeightFormat::kQ5_0,      WeightFormat::kQ5_0     },
    {WeightFormat::kQ5_1,      WeightFormat::kQ5_1     },
    {WeightFormat::kIq3Xxs,    WeightFormat::kIq3Xxs   },
    {WeightFormat::kIq3S,      WeightFormat::kIq3S     },
    {WeightFormat::kIq2Xxs,    WeightFormat::kIq2Xxs   },
    {WeightFormat::kIq2Xs,     WeightFormat::kIq2Xs    },
    {WeightFormat::kIq2S,      WeightFormat::kIq2S     },
    {WeightFormat::kQ3K,       WeightFormat::kQ3K      },
    {WeightFormat::kQ2K,       WeightFormat::kQ2K      },
    {WeightFormat::kInt4Zp,    WeightFormat::kInt4Zp   },
};

struct Loaded {
  std::unique_ptr<CpuBackend> backend;
  std::unique_ptr<ExpertLayer> layer;
};

Loaded load(Isa isa, uint32_t threads, const FfnSpec& spec, const StoredExperts& experts,
            uint32_t count, ResidentFormats formats) {
  Loaded loaded;
  loaded.backend = CpuBackend::create(isa, threads).value();
  loaded.layer = loaded.backend->create_layer(spec, count, formats, kClass).value();
  const Status status = experts.load_into(*loaded.layer);
  REQUIRE_MESSAGE(status.ok(), (status.ok() ? "" : status.error().message));
  return loaded;
}

std::vector<Isa> kernel_isas() {
  std::vector<Isa> found;
  for (Isa isa : kAllIsas) {
    if (isa != Isa::kReference && isa_is_supported(isa)) found.push_back(isa);
  }
  return found;
}

TEST_CASE(
    "int8-groups: every instruction set gives the twin's bits in every format, for few rows and "
    "many") {
  uint32_t seed = 1;
  for (const FormatCase& format : kCases) {
    const uint32_t block = format_facts(format.stored).block;
    const uint32_t ins[] = {block == 256  ? 512u
                            : block == 32 ? 288u
                                          : 300u,
                            block},
                   mids[] = {block == 256  ? 256u
                             : block == 32 ? 96u
                                           : 70u,
                             block};
    for (uint32_t shape = 0; shape < 2; ++shape) {
      const FfnSpec spec = spec_of(ins[shape], mids[shape], 37);
      const StoredExperts experts(spec, 2, format.stored, format.stored, ++seed);
      const Loaded twin = load(Isa::kReference, 1, spec, experts, 2, format.resident);
      for (uint32_t rows : {1u, 2u, 3u, 4u, 5u, 13u}) {
        Batch batch = Batch::random(spec, 2, rows, 3, ++seed);
        // all rows on one expert: the kernels' own numbers of rows
        batch.row_counts.assign(rows, 1);
        batch.ids.assign(rows, 1);
        batch.weights.assign(rows, 0.75f);
        const std::vector<std::byte> expected = reply_of(*twin.layer, batch);
        for (Isa isa : kernel_isas()) {
          const Loaded loaded = load(isa, 1 + rows % 2, spec, experts, 2, format.resident);
          CHECK_MESSAGE(reply_of(*loaded.layer, batch) == expected, isa_name(isa), ", ",
                        format_name(format.resident), ", ", rows, " rows");
        }
      }
    }
  }
}

TEST_CASE(
    "int8-groups: every number of rows gives the twin's bits, spread over experts, with one thread "
    "and more") {
  const FfnSpec spec = spec_of(544, 96, 130);
  const StoredExperts experts(spec, 5, WeightFormat::kQ8_0, WeightFormat::kQ4_0, 5);
  const ResidentFormats formats{WeightFormat::kQ8_0, WeightFormat::kQ4_0};
  const Loaded twin = load(Isa::kReference, 1, spec, experts, 5, formats);
  for (Isa isa : kernel_isas()) {
    const Loaded one = load(isa, 1, spec, experts, 5, formats),
                 two = load(isa, 2, spec, experts, 5, formats);
    for (uint32_t rows : {1u, 4u, 6u, 7u, 12u, 19u, 97u, 150u}) {
      Batch batch = Batch::random(spec, 5, rows, 4, rows);
      batch.row_dtype = static_cast<Dtype>(rows % 3);
      const std::vector<std::byte> expected = reply_of(*twin.layer, batch);
      CHECK(reply_of(*one.layer, batch) == expected);
      CHECK(reply_of(*two.layer, batch) == expected);
    }
  }
}

TEST_CASE("int8-groups: weights made of floats of any width have the twin's bits") {
  uint32_t seed = 40;
  struct Shape {
    uint32_t in, intermediate, out;
  };
  for (const Shape& shape : {
           Shape{1,   1,   1  },
           {7,   5,   3  },
           {255, 33,  65 },
           {257, 300, 40 },
           {600, 31,  515}
  }) {
    for (WeightFormat resident : {WeightFormat::kInt8G32, WeightFormat::kInt4G32}) {
      FfnSpec spec = spec_of(shape.in, shape.intermediate, shape.out);
      spec.has_gate_up_bias = spec.has_down_bias = ++seed % 2 == 0;
      const toy::Experts experts(spec, 2, Dtype::kBF16, seed);
      const Batch batch = Batch::random(spec, 2, 9, 3, seed);
      const auto with = [&](Isa isa) {
        const auto backend = CpuBackend::create(isa, 1).value();
        const auto layer = backend->create_layer(spec, 2, resident, kClass).value();
        REQUIRE(experts.load_into(*layer).ok());
        return reply_of(*layer, batch);
      };
      const std::vector<std::byte> expected = with(Isa::kReference);
      for (Isa isa : kernel_isas())
        CHECK_MESSAGE(with(isa) == expected, isa_name(isa), ", ", shape.in, " inputs");
    }
  }
}

TEST_CASE("int8-groups: a row's bits do not depend on the rows beside it") {
  const FfnSpec spec = spec_of(512, 256, 64);
  const StoredExperts experts(spec, 2, WeightFormat::kQ5K, WeightFormat::kQ6K, 21);
  for (Isa isa : kernel_isas()) {
    const Loaded loaded = load(isa, 1, spec, experts, 2, {WeightFormat::kQ5K, WeightFormat::kQ6K});
    Batch batch = Batch::random(spec, 2, 20, 1, 22);
    batch.row_counts.assign(20, 1);
    batch.ids.assign(20, 0);
    batch.weights.assign(20, 0.5f);
    const std::vector<std::byte> together = reply_of(*loaded.layer, batch);
    // slices of 1, 1, 2, 4, ... rows
    for (uint32_t begin = 0, end = 1; begin < 20; begin = end, end = std::min(2 * end, 20u)) {
      Batch slice = batch;
      slice.rows.assign(batch.rows.begin() + begin * 512, batch.rows.begin() + end * 512);
      slice.row_counts.assign(end - begin, 1);
      slice.ids.assign(end - begin, 0);
      slice.weights.assign(end - begin, 0.5f);
      const std::vector<std::byte> found = reply_of(*loaded.layer, slice);
      REQUIRE(std::memcmp(found.data(), together.data() + size_t{begin} * 4 * 64, found.size()) ==
              0);
    }
  }
}

TEST_CASE("int8-groups: NaN and infinity make their own row NaN and leave the others alone") {
  const FfnSpec spec = spec_of(256, 64, 33);
  const StoredExperts experts(spec, 1, WeightFormat::kQ4_0, WeightFormat::kQ8_0, 31);
  for (Isa isa : kAllIsas) {
    if (!isa_is_supported(isa)) continue;
    const Loaded loaded =
        load(isa, 1, spec, experts, 1, {WeightFormat::kQ4_0, WeightFormat::kQ8_0});
    for (uint32_t rows : {3u, 9u}) {
      Batch batch = Batch::random(spec, 1, rows, 1, 32);
      batch.row_counts.assign(rows, 1);
      batch.ids.assign(rows, 0);
      batch.weights.assign(rows, 1.0f);
      const std::vector<std::byte> clean = reply_of(*loaded.layer, batch);
      for (float special :
           {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
            -std::numeric_limits<float>::infinity()}) {
        Batch spoilt = batch;
        spoilt.rows[256 + 100] = special;  // of row 1
        const std::vector<std::byte> found = reply_of(*loaded.layer, spoilt);
        for (uint32_t r = 0; r < rows; ++r) {
          for (uint32_t o = 0; o < 33; ++o) {
            const size_t at = 4 * (size_t{r} * 33 + o);
            uint32_t bits;
            std::memcpy(&bits, found.data() + at, 4);
            if (r == 1)
              CHECK(bits == 0x7fc00000u);
            else
              CHECK(std::memcmp(found.data() + at, clean.data() + at, 4) == 0);
          }
        }
      }
    }
  }
}

TEST_CASE(
    "int8-groups: rows of the largest codes, of zeros and of the smallest numbers give the twin's "
    "bits") {
  const FfnSpec spec = spec_of(512, 256, 48);
  for (const FormatCase& format : kCases) {
    const StoredExperts experts(spec, 1, format.stored, format.stored, 51);
    Batch batch;
    for (float value : {1.0f, -1.0f, 0.0f, 190.0f * 0x1p-149f, 63.0f * 0x1p-149f, 1e30f}) {
      // 127 or -127 nearly everywhere
      for (uint32_t i = 0; i < 512; ++i) batch.rows.push_back(i % 31 == 0 ? -value : value);
    }
    batch.row_counts.assign(6, 1);
    batch.ids.assign(6, 0);
    batch.weights.assign(6, 1.0f);
    const std::vector<std::byte> expected =
        reply_of(*load(Isa::kReference, 1, spec, experts, 1, format.resident).layer, batch);
    for (Isa isa : kernel_isas()) {
      CHECK_MESSAGE(
          reply_of(*load(isa, 1, spec, experts, 1, format.resident).layer, batch) == expected,
          isa_name(isa), ", ", format_name(format.resident));
    }
  }
}

}  // namespace
}  // namespace dflash::compute
