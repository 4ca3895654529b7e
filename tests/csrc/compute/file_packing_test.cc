// Packing out of a file that is read rather than mapped, and quantisation as wide as the processor
// allows: the same bits as from memory and as the readable twin's.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/convert_kernels.h"
#include "compute/cpu/panels/quantize_groups.h"
#include "compute/formats/dequantize.h"
#include "failed.h"
#include "memory_file.h"
#include "twins.h"

namespace dflash::compute {
namespace {

FfnSpec spec() { return toy::spec_of(1024, 768, 1024); }

TEST_CASE("experts read from a file in parts compute what experts in memory do, in every format") {
  const toy::Batch batch = toy::Batch::random(spec(), 1, 3, 3, 5);
  for (uint8_t value = 0; value < kNumWeightFormats; ++value) {
    const auto resident = static_cast<WeightFormat>(value);
    if (!has_panels(resident)) continue;
    const toy::StoredExperts experts(spec(), 1, toy::source_of(resident), toy::source_of(resident),
                                     value + 1u);
    const auto from_memory = toy::layer_of(best_isa(), spec(), 1, resident),
               from_file = toy::layer_of(best_isa(), spec(), 1, resident);
    const toy::MemoryFile file;
    YieldingProgress progress{0};
    REQUIRE(from_memory->load_expert(0, experts.weights(0), progress).ok());
    REQUIRE(from_file->load_expert(0, toy::in_file(experts.weights(0), file), progress).ok());
    CHECK_MESSAGE(file.num_copies() >= 3, format_name(resident));
    CHECK_MESSAGE(reply_of(*from_file, batch) == reply_of(*from_memory, batch),
                  std::string(format_name(resident)));
  }
}

TEST_CASE("a file that ends while an expert is read from it leaves the expert unloaded") {
  const auto layer = toy::layer_of(best_isa(), spec(), 1, WeightFormat::kBF16);
  const toy::StoredExperts experts(spec(), 1, WeightFormat::kBF16, WeightFormat::kBF16, 1);
  const toy::MemoryFile file(4);
  YieldingProgress progress{0};
  CHECK(layer->load_expert(0, toy::in_file(experts.weights(0), file), progress) ==
        Failed(ErrorCode::kCheckpoint));
  std::vector<std::byte> reply;
  CHECK_FALSE(toy::Batch::random(spec(), 1, 3, 3, 5).run(*layer, reply).ok());
}

TEST_CASE("a damaged scale behind the first part is named by its place in the whole matrix") {
  const auto layer = toy::layer_of(best_isa(), spec(), 1, WeightFormat::kQ8_0);
  toy::StoredExperts experts(spec(), 1, WeightFormat::kQ8_0, WeightFormat::kQ8_0, 1);
  experts.damage_down(1000);
  const toy::MemoryFile file;
  YieldingProgress progress{0};
  CHECK(layer->load_expert(0, toy::in_file(experts.weights(0), file), progress) ==
        Failed(ErrorCode::kCheckpoint, "output 1000,"));
}

using Quantize = void (*)(const float*, uint32_t, float, int8_t*, float*);

// Groups of every size of value, subnormals and zeros included.
std::vector<float> finite_groups(uint32_t num_groups) {
  std::mt19937 random(7);
  std::vector<float> values(size_t{num_groups} * kGroupInputs);
  for (uint32_t group = 0; group < num_groups; ++group) {
    const auto exponent = group % 16 == 0 ? 0u : static_cast<uint32_t>(random() % 248);
    for (uint32_t i = 0; i < kGroupInputs; ++i) {
      const auto spread = exponent == 0 ? 0u : static_cast<uint32_t>(random() % 6);
      const uint32_t bits = (static_cast<uint32_t>(random()) & 0x807fffffu) | (exponent + spread)
                                                                                  << 23;
      if (group % 64 != 0)
        std::memcpy(&values[size_t{group} * kGroupInputs + i], &bits, sizeof(bits));
    }
  }
  return values;
}

TEST_CASE("every loop quantises a group as its readable twin does") {
  constexpr uint32_t kGroups = 4096;
  const std::vector<float> values = finite_groups(kGroups);
  std::vector<Quantize> loops{quantize_groups};
#if defined(__x86_64__)
  if (dflash::internal::has_avx512()) loops.push_back(internal::quantize_groups_avx512);
  if (dflash::internal::has_avx2_f16c()) loops.push_back(internal::quantize_groups_avx2);
#endif
  for (float limit : {127.0f, 7.0f}) {
    std::vector<int8_t> expected(values.size()), found(values.size());
    std::vector<float> scales(kGroups), found_scales(kGroups);
    for (size_t g = 0; g < kGroups; ++g)
      scales[g] = quantize_group(&values[g * kGroupInputs], limit, &expected[g * kGroupInputs]);
    for (Quantize loop : loops) {
      loop(values.data(), kGroups, limit, found.data(), found_scales.data());
      CHECK(found == expected);
      CHECK(std::memcmp(found_scales.data(), scales.data(), sizeof(float) * kGroups) == 0);
    }
  }
}

}  // namespace
}  // namespace dflash::compute
