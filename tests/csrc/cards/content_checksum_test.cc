// What a card says of an expert's source bytes: what everybody says of them.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include "cards/card_scene.h"
#include "compute/odd_layouts.h"

namespace dflash::compute::gpu {
namespace {

using toy::read_all;

uint64_t loaded_on_card(const FfnSpec& spec, ResidentFormats formats,
                        const ExpertWeights& weights) {
  const auto layer = layer_on(
      device_of({.vendor = SimulatedVendor::kCuda, .memory_bytes = kCardBytes}), spec, 2, formats);
  YieldingProgress progress;
  REQUIRE(layer->load_expert(1, weights, progress).ok());
  CHECK_FALSE(layer->content_checksum(0).has_value());
  return layer->content_checksum(1).value();
}

TEST_CASE("a card and the reader agree on the bytes of every format") {
  uint32_t seed = 0;
  for (WeightFormat resident : kCardFormats) {
    const FfnSpec spec = toy::uneven_spec_of(resident);
    const toy::StoredExperts experts(spec, 1, toy::source_of(resident), toy::source_of(resident),
                                     ++seed);
    CAPTURE(format_name(resident));
    CHECK(loaded_on_card(spec, resident, experts.weights(0)) == read_all(experts.weights(0)));
  }
}

TEST_CASE("a card and the reader agree on the bytes of every layout") {
  for (const auto& expert : toy::odd_layouts()) {
    CAPTURE(expert->name);
    CHECK(loaded_on_card(expert->spec, expert->dtype, expert->weights) ==
          read_all(expert->weights));
  }
}

}  // namespace
}  // namespace dflash::compute::gpu
