// What an expert's source bytes add up to: the same for every holder, another for every flipped
// bit.
// SPDX-License-Identifier: Apache-2.0
#include "compute/experts/content_checksum.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "failed.h"
#include "memory_file.h"
#include "odd_layouts.h"
#include "twins.h"

namespace dflash::compute {
namespace {

using toy::read_all;

// What a layer of `isa` says of its only expert.
uint64_t packed(Isa isa, const FfnSpec& spec, ResidentFormats formats,
                const ExpertWeights& weights) {
  const auto layer = toy::layer_of(isa, spec, 1, formats);
  YieldingProgress progress{0};
  CHECK_FALSE(layer->content_checksum(0).has_value());
  const Status loaded = layer->load_expert(0, weights, progress);
  REQUIRE_MESSAGE(loaded.ok(), (loaded.ok() ? "" : loaded.error().message));
  return layer->content_checksum(0).value();
}

TEST_CASE("every kernel set and the reader agree on what an expert's bytes add up to") {
  for (uint8_t value = 0; value < kNumWeightFormats; ++value) {
    const auto resident = static_cast<WeightFormat>(value);
    if (!has_panels(resident)) continue;
    const WeightFormat source = toy::source_of(resident);
    const FfnSpec spec = toy::uneven_spec_of(resident);
    const toy::StoredExperts experts(spec, 1, source, source, value + 1u);
    const uint64_t expected = read_all(experts.weights(0));
    for (Isa isa : kAllIsas) {
      if (!isa_is_supported(isa)) continue;
      CAPTURE(isa_name(isa));
      CAPTURE(format_name(resident));
      CHECK(packed(isa, spec, resident, experts.weights(0)) == expected);
    }
    CHECK(packed(best_isa(), spec, WeightFormat::kF32, experts.weights(0)) == expected);
  }
}

TEST_CASE("the layout of a checkpoint makes no difference between kernel sets and the reader") {
  for (const auto& expert : toy::odd_layouts()) {
    const uint64_t expected = read_all(expert->weights);
    for (Isa isa : kAllIsas) {
      if (!isa_is_supported(isa)) continue;
      CAPTURE(isa_name(isa));
      CAPTURE(expert->name);
      CHECK(packed(isa, expert->spec, expert->dtype, expert->weights) == expected);
    }
  }
}

TEST_CASE("bytes read out of the file add up to those of its mapping, in steps of any size") {
  for (WeightFormat format : {WeightFormat::kBF16, WeightFormat::kFp8E4m3B128, WeightFormat::kMxfp4,
                              WeightFormat::kQ6K}) {
    const FfnSpec spec = toy::spec_of(512, 768, 300);
    const toy::StoredExperts experts(spec, 1, format, format, 3);
    const uint64_t expected = read_all(experts.weights(0));
    const toy::MemoryFile file;
    const ExpertWeights in_file = toy::in_file(experts.weights(0), file);
    CAPTURE(format_name(format));
    for (size_t step_bytes : {size_t{1}, size_t{1000}, size_t{70'000}, SIZE_MAX})
      CHECK(read_all(in_file, step_bytes) == expected);
    CHECK(file.num_copies() > 0);
    CHECK(read_all(experts.weights(0), 1) == expected);
    CHECK(packed(best_isa(), spec, format, in_file) == expected);
  }
}

TEST_CASE("a step of the reader is bounded, and a file that ends early is its error") {
  const toy::StoredExperts experts(toy::spec_of(512, 768, 300), 1, WeightFormat::kBF16,
                                   WeightFormat::kBF16, 3);
  ContentReader reader(experts.weights(0));
  uint32_t steps = 1;
  while (!reader.read(10'000).value()) ++steps;
  CHECK(steps >= 3u * 512 * 768 * 2 / 10'000 * 2 / 3);  // down is smaller
  const toy::MemoryFile file(1);
  ContentReader broken(toy::in_file(experts.weights(0), file));
  Result<bool> read = broken.read(100'000);
  REQUIRE(read.ok());
  for (int i = 0; read.ok() && i < 10; ++i) read = broken.read(100'000);
  CHECK(read == Failed(ErrorCode::kCheckpoint));
}

TEST_CASE("lines add up in any order and from any threads") {
  const toy::StoredExperts experts(toy::spec_of(256, 500, 64), 1, WeightFormat::kFp8E4m3B128,
                                   WeightFormat::kFp8E4m3B128, 9);
  const MatrixView matrix = experts.weights(0).gate;
  MatrixChecksum whole;
  whole.add(matrix, 0, 0, matrix.outputs);
  std::vector<uint32_t> pieces((matrix.outputs + 6) / 7);
  std::iota(pieces.begin(), pieces.end(), 0u);
  std::shuffle(pieces.begin(), pieces.end(), std::mt19937(4));
  const auto add_piece = [&matrix](MatrixChecksum& sum, uint32_t piece) {
    sum.add(matrix, 0, 7 * piece, std::min(7u, matrix.outputs - 7 * piece));
  };
  MatrixChecksum shuffled;
  for (uint32_t piece : pieces) add_piece(shuffled, piece);
  CHECK(shuffled.value() == whole.value());
  MatrixChecksum halves[2];
  std::thread other([&] {
    for (size_t i = 1; i < pieces.size(); i += 2) add_piece(halves[1], pieces[i]);
  });
  for (size_t i = 0; i < pieces.size(); i += 2) add_piece(halves[0], pieces[i]);
  other.join();
  CHECK(halves[0].value() + halves[1].value() == whole.value());
}

// Every bit of `bytes` turned over, one after the other; `value` reads them.
template <class Value>
void check_every_bit(std::span<std::byte> bytes, uint64_t expected, const Value& value) {
  uint64_t unseen = 0;
  for (std::byte& byte : bytes) {
    for (int bit = 0; bit < 8; ++bit) {
      byte ^= std::byte{1} << bit;
      unseen += value() == expected ? 1 : 0;
      byte ^= std::byte{1} << bit;
    }
  }
  CHECK(unseen == 0);
}

// The view's bytes, which the test made.
std::span<std::byte> writable(const std::byte* from, size_t num_bytes) {
  return {const_cast<std::byte*>(from), num_bytes};
}

TEST_CASE("every flipped bit of a small expert is seen, in every stored format") {
  for (uint8_t value = 0; value < kNumWeightFormats; ++value) {
    const auto format = static_cast<WeightFormat>(value);
    if (!format_facts(format).is_stored) continue;
    const uint32_t width = std::max(format_facts(format).block, 8u);
    const toy::StoredExperts experts(toy::spec_of(width, width, 3), 1, format, format, 5);
    const ExpertWeights weights = experts.weights(0);
    const uint64_t expected = read_all(weights);
    CAPTURE(format_name(format));
    for (const MatrixView& matrix : {weights.gate, weights.down}) {
      const size_t row = row_bytes(format, matrix.inputs);
      // of a large matrix the first rows, which have all places of a row
      check_every_bit(writable(matrix.data, std::min<size_t>(matrix.outputs, 3) * row), expected,
                      [&] { return read_all(weights); });
      if (matrix.scales == nullptr) continue;
      check_every_bit(writable(matrix.scales, static_cast<size_t>(matrix.scales_stride)), expected,
                      [&] { return read_all(weights); });
    }
  }
}

TEST_CASE("every flipped bit of a bias and of a transposed matrix is seen, and none between rows") {
  auto columns = toy::laid_out("alternating columns", Dtype::kBF16, 1);
  const auto value = [&columns] { return read_all(columns->weights); };
  check_every_bit(columns->biases, value(), value);
  // gate and up take two of three thirds
  check_every_bit(std::span(columns->first).first(1200), value(), value);
  auto padded = toy::laid_out("padded rows", Dtype::kBF16, 1);
  const uint64_t before = read_all(padded->weights);
  std::memset(padded->first.data() + 2 * 70, 0x55, 6);  // behind the first row
  CHECK(read_all(padded->weights) == before);
}

TEST_CASE("what changes places changes the value") {
  const toy::Experts experts(toy::spec_of(40, 24, 30), 2, Dtype::kF32, 8);
  std::set<uint64_t> values;
  ExpertWeights weights = experts.weights(0);
  values.insert(read_all(weights));
  std::swap(weights.gate, weights.up);
  values.insert(read_all(weights));
  weights = experts.weights(0);
  std::vector<std::byte> rows(weights.gate.data, weights.gate.data + size_t{24} * 40 * 4);
  std::swap_ranges(rows.begin(), rows.begin() + 160, rows.begin() + 160);
  weights.gate.data = rows.data();
  values.insert(read_all(weights));
  const uint64_t first = read_all(experts.weights(0)), second = read_all(experts.weights(1));
  values.insert(second);
  values.insert(shard_checksum(std::vector<uint64_t>{first, second}));
  values.insert(shard_checksum(std::vector<uint64_t>{second, first}));
  values.insert(shard_checksum(std::vector<uint64_t>{first}));
  CHECK(values.size() == 7);
}

TEST_CASE(
    "an expert that stays in the mapped checkpoint is unchecked, and one that failed to load") {
  const toy::StoredExperts experts(toy::spec_of(64, 64, 64), 1, WeightFormat::kBF16,
                                   WeightFormat::kBF16, 1);
  YieldingProgress progress{0};
  const auto mapped = toy::layer_of(best_isa(), experts.spec(), 1, WeightFormat::kBF16,
                                    kDefaultNumerics, 1, WeightsLayout::kMapped);
  REQUIRE(mapped->load_expert(0, experts.weights(0), progress).ok());
  CHECK_FALSE(mapped->content_checksum(0).has_value());
  const auto packed = toy::layer_of(best_isa(), experts.spec(), 1, WeightFormat::kBF16);
  REQUIRE(packed->load_expert(0, experts.weights(0), progress).ok());
  CHECK(packed->content_checksum(0).has_value());
  const toy::MemoryFile file(0);
  CHECK_FALSE(packed->load_expert(0, toy::in_file(experts.weights(0), file), progress).ok());
  CHECK_FALSE(packed->content_checksum(0).has_value());
}

// So that no later build takes another value for the same bytes: a host and its workers may be of
// two releases.
TEST_CASE("the definition stays") {
  std::vector<std::byte> bytes(size_t{3} * 16 * 100);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 256);
  ExpertWeights weights;
  weights.gate = {bytes.data(), WeightFormat::kBF16, 16, 100, 100, 1};
  weights.up = {bytes.data(), WeightFormat::kBF16, 100, 16, 1, 100};
  weights.down = {bytes.data(), WeightFormat::kMxfp4, 20, 64, 32, 0, bytes.data() + 1000, 2};
  weights.up_bias = {bytes.data() + 2, Dtype::kBF16, 100, 3};
  CHECK(read_all(weights) == 4514949257855438063u);
}

}  // namespace
}  // namespace dflash::compute
