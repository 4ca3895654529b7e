// Packings of checkpoints: rows made plain are those that a loop over single codes makes, for every
// cut; layers that load a packing give the bits and checksums of one that loads plain blocks.
// SPDX-License-Identifier: Apache-2.0
#include "compute/formats/plain_rows.h"

#include <doctest/doctest.h>

#include <bit>
#include <functional>

#include "compute/formats/dequantize.h"
#include "twins.h"

namespace dflash::compute {
namespace {

using toy::Batch;
using toy::reply_of;

constexpr uint32_t kAwqOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // output of a word's nibble

// Codes, zero points and scales of a random matrix, packed and in plain blocks.
class PackedMatrix {
 public:
  PackedMatrix(Packing packing, Dtype scale_dtype, uint32_t outputs, uint32_t inputs,
               uint32_t group, uint32_t seed)
      : outputs_(outputs), inputs_(inputs), groups_(inputs / group) {
    std::mt19937 random(seed);
    const bool is_by_rows = packing == Packing::kPackQuantized;
    const bool is_awq = packing == Packing::kAwq;
    fill(codes_, size_t{outputs} * inputs, random);
    fill(zeros_, size_t{outputs} * groups_, random);
    auto scales = toy::random_floats(random, size_t{outputs} * groups_, 0.02f);
    scale_bytes_ = toy::encode(scale_dtype, scales);
    widen(scale_dtype, scale_bytes_.data(), scales.data(), scales.size());
    const auto code = [&](uint32_t o, uint32_t i) { return codes_[size_t{o} * inputs + i]; };
    const auto zero = [&](uint32_t o, uint32_t g) { return zeros_[size_t{o} * groups_ + g]; };
    if (is_by_rows) {
      words_ =
          packed(outputs, inputs / 8, [&](auto r, auto w, auto n) { return code(r, 8 * w + n); });
      zero_words_ = packed((outputs + 7) / 8, groups_, [&](auto r, auto g, auto n) {
        return 8 * r + n < outputs ? zero(8 * r + n, g) : 0;
      });
    } else {
      const auto output = [&](uint32_t w, uint32_t n) {
        return 8 * w + (is_awq ? kAwqOrder[n] : n);
      };
      words_ = is_awq ? packed(inputs, outputs / 8,
                               [&](auto r, auto w, auto n) { return code(output(w, n), r); })
                      : packed(inputs / 8, outputs,
                               [&](auto r, auto o, auto n) { return code(o, 8 * r + n); });
      zero_words_ = packed(groups_, outputs / 8,
                           [&](auto g, auto w, auto n) { return zero(output(w, n), g); });
    }
    set_view(packing, scale_dtype, group);
    const auto scale = [&](uint32_t o, uint32_t g) {
      return is_by_rows ? scales[size_t{o} * groups_ + g] : scales[size_t{g} * outputs + o];
    };
    make_blocks(group, packing == Packing::kGptq ? 1 : 0, scale);
  }

  const MatrixView& view() const { return view_; }
  MatrixView plain() const {
    return {.data = blocks_.data(),
            .format = WeightFormat::kInt4Zp,
            .outputs = outputs_,
            .inputs = inputs_,
            .output_stride = static_cast<int64_t>(row_bytes(WeightFormat::kInt4Zp, inputs_))};
  }
  const std::vector<std::byte>& blocks() const { return blocks_; }

 private:
  using Nibble = std::function<uint32_t(uint32_t row, uint32_t word, uint32_t nibble)>;

  static void fill(std::vector<uint32_t>& values, size_t count, std::mt19937& random) {
    for (size_t i = 0; i < count; ++i) values.push_back(random() % 16);
  }
  static std::vector<uint32_t> packed(uint32_t rows, uint32_t words, const Nibble& nibble) {
    std::vector<uint32_t> made(size_t{rows} * words, 0);
    for (uint32_t r = 0; r < rows; ++r) {
      for (uint32_t w = 0; w < words; ++w) {
        for (uint32_t n = 0; n < 8; ++n) made[size_t{r} * words + w] |= nibble(r, w, n) << (4 * n);
      }
    }
    return made;
  }
  static const std::byte* bytes(const std::vector<uint32_t>& words) {
    return reinterpret_cast<const std::byte*>(words.data());
  }

  void set_view(Packing packing, Dtype scale_dtype, uint32_t group) {
    const bool is_by_rows = packing == Packing::kPackQuantized;
    const uint32_t words = is_by_rows                 ? inputs_ / 8
                           : packing == Packing::kAwq ? outputs_ / 8
                                                      : outputs_;
    view_ = {.data = bytes(words_),
             .format = WeightFormat::kInt4Zp,
             .outputs = outputs_,
             .inputs = inputs_,
             .output_stride = 4 * int64_t{words},
             .scales = scale_bytes_.data(),
             .scales_stride = static_cast<int64_t>(dtype_bytes(scale_dtype)) *
                              (is_by_rows ? groups_ : outputs_)};
    view_.layout = {.packing = packing,
                    .scale_dtype = scale_dtype,
                    .zero_bias = static_cast<uint8_t>(packing == Packing::kGptq ? 1 : 0),
                    .scale_outputs = 1,
                    .scale_inputs = group,
                    .zeros = bytes(zero_words_),
                    .zeros_stride = 4 * int64_t{is_by_rows ? groups_ : outputs_ / 8}};
  }
  void make_blocks(uint32_t group, uint32_t bias,
                   const std::function<float(uint32_t, uint32_t)>& scale) {
    for (uint32_t o = 0; o < outputs_; ++o) {
      for (uint32_t i = 0; i < inputs_; i += 32) {
        const uint32_t g = i / group;
        const uint32_t word =
            std::bit_cast<uint32_t>(scale(o, g)) | (zeros_[size_t{o} * groups_ + g] + bias);
        for (uint32_t b = 0; b < 4; ++b) blocks_.push_back(static_cast<std::byte>(word >> (8 * b)));
        for (uint32_t b = 0; b < 16; ++b) {
          const size_t at = size_t{o} * inputs_ + i + 2 * b;
          blocks_.push_back(static_cast<std::byte>(codes_[at] | codes_[at + 1] << 4));
        }
      }
    }
  }

  uint32_t outputs_, inputs_, groups_;
  std::vector<uint32_t> codes_, zeros_, words_, zero_words_;
  std::vector<std::byte> scale_bytes_, blocks_;
  MatrixView view_;
};

constexpr Packing kPackings[] = {Packing::kPackQuantized, Packing::kGptq, Packing::kAwq};

TEST_CASE("rows of packed integers become the blocks that single codes make, for every cut") {
  uint32_t seed = 0;
  for (Packing packing : kPackings) {
    for (uint32_t group : {32u, 64u, 192u}) {
      const Dtype dtype = ++seed % 2 == 0 ? Dtype::kF16 : Dtype::kBF16;
      const PackedMatrix matrix(packing, dtype, 40, 192, group, seed);
      const size_t row = row_bytes(WeightFormat::kInt4Zp, 192);
      CAPTURE(static_cast<int>(packing));
      CAPTURE(group);
      for (uint32_t first : {0u, 3u, 8u, 39u}) {
        for (uint32_t count : {1u, 7u, 16u, 40u}) {
          if (first + count > 40) continue;
          std::vector<std::byte> made;
          const MatrixView plain = plain_rows(matrix.view(), first, count, made);
          CHECK(is_plain(plain));
          CHECK(std::equal(plain.data, plain.data + count * row,
                           matrix.blocks().data() + first * row));
        }
      }
    }
  }
}

TEST_CASE("without zero points every code stands for code - 8") {
  PackedMatrix matrix(Packing::kPackQuantized, Dtype::kBF16, 8, 32, 32, 9);
  MatrixView view = matrix.view();
  view.layout.zeros = nullptr;
  std::vector<std::byte> made;
  const MatrixView plain = plain_matrix(view, made);
  for (uint32_t o = 0; o < 8; ++o) CHECK((plain.data[o * 20] & std::byte{31}) == std::byte{8});
}

struct PackedExpert {
  PackedMatrix gate, up, down;
  PackedExpert(Packing packing, Dtype dtype)
      : gate(packing, dtype, 64, 96, 32, 1),
        up(packing, dtype, 64, 96, 96, 2),
        down(packing, dtype, 72, 64, 64, 3) {}
  ExpertWeights weights(bool is_packed) const {
    ExpertWeights found;
    found.gate = is_packed ? gate.view() : gate.plain();
    found.up = is_packed ? up.view() : up.plain();
    found.down = is_packed ? down.view() : down.plain();
    return found;
  }
};

TEST_CASE("layers that load a packing give the bits and checksums of one that loads plain blocks") {
  const FfnSpec spec{.in_size = 96, .intermediate_size = 64, .out_size = 72};
  const Batch batch = Batch::random(spec, 1, 9, 1, 4);
  YieldingProgress progress{0};
  for (Packing packing : kPackings) {
    const PackedExpert expert(packing, Dtype::kF16);
    const auto reference = make_reference_layer(spec, 1, WeightFormat::kInt4Zp);
    REQUIRE(reference->load_expert(0, expert.weights(false), progress).ok());
    const std::vector<std::byte> expected = reply_of(*reference, batch);
    const uint64_t checksum = toy::read_all(expert.weights(false));
    CHECK(toy::read_all(expert.weights(true)) == checksum);
    REQUIRE(reference->load_expert(0, expert.weights(true), progress).ok());
    CHECK(reply_of(*reference, batch) == expected);
    CHECK(reference->content_checksum(0) == checksum);
    for (Isa isa : toy::kernel_sets()) {
      for (WeightsLayout layout : {WeightsLayout::kPacked, WeightsLayout::kMapped}) {
        CAPTURE(isa_name(isa));
        const auto layer =
            toy::layer_of(isa, spec, 1, WeightFormat::kInt4Zp, kDefaultNumerics, 1, layout);
        REQUIRE(layer->load_expert(0, expert.weights(true), progress).ok());
        CHECK(reply_of(*layer, batch) == expected);
        if (layout == WeightsLayout::kPacked) CHECK(layer->content_checksum(0) == checksum);
      }
    }
  }
}

// FP8 codes with scales of some shape and dtype.
struct ScaledCodes {
  std::vector<std::byte> codes, scales;
  std::vector<float> wide;
  MatrixView view;
  ScaledCodes(uint32_t outputs, uint32_t inputs, Dtype dtype, uint32_t scale_outputs,
              uint32_t scale_inputs, uint32_t seed) {
    std::mt19937 random(seed);
    for (uint32_t i = 0; i < outputs * inputs; ++i)
      codes.push_back(static_cast<std::byte>(random() % 2 * 128 + random() % 127));
    const uint32_t rows = (outputs + scale_outputs - 1) / scale_outputs,
                   columns = (inputs + scale_inputs - 1) / scale_inputs;
    wide = toy::random_floats(random, size_t{rows} * columns, 0.001f);
    scales = toy::encode(dtype, wide);
    widen(dtype, scales.data(), wide.data(), wide.size());
    view = {.data = codes.data(),
            .format = WeightFormat::kFp8E4m3B128,
            .outputs = outputs,
            .inputs = inputs,
            .output_stride = inputs,
            .scales = scales.data(),
            .scales_stride = static_cast<int64_t>(columns * dtype_bytes(dtype))};
    view.layout = {.packing = Packing::kFp8Scales,
                   .scale_dtype = dtype,
                   .scale_outputs = scale_outputs,
                   .scale_inputs = scale_inputs};
  }
};

TEST_CASE("fp8 with a scale per tensor, output or square in any dtype gives code * scale") {
  const FfnSpec spec{.in_size = 200, .intermediate_size = 136, .out_size = 40};
  const Batch batch = Batch::random(spec, 1, 9, 1, 4);
  YieldingProgress progress{0};
  for (auto [outputs, inputs] : {
           std::pair{1000u, 1000u},
           {1u,    1000u},
           {128u,  128u }
  }) {
    const Dtype dtype = outputs == 1 ? Dtype::kBF16 : outputs == 128 ? Dtype::kF16 : Dtype::kF32;
    const ScaledCodes gate(136, 200, dtype, outputs, inputs, 1),
        up(136, 200, dtype, outputs, inputs, 2), down(40, 136, dtype, outputs, inputs, 3);
    std::vector<float> values(size_t{136} * 200);
    dequantize(gate.view, 0, 136, values.data());
    const uint32_t columns = (200 + inputs - 1) / inputs;
    for (uint32_t at : {0u, 199u, 130u * 200 + 127, 135u * 200 + 128}) {
      const float scale = gate.wide[at / 200 / outputs * columns + at % 200 / inputs];
      CHECK(values[at] == e4m3_to_f32(static_cast<uint8_t>(gate.codes[at])) * scale);
    }
    ExpertWeights weights;
    weights.gate = gate.view;
    weights.up = up.view;
    weights.down = down.view;
    const auto reference = make_reference_layer(spec, 1, WeightFormat::kFp8E4m3B128);
    REQUIRE(reference->load_expert(0, weights, progress).ok());
    const std::vector<std::byte> expected = reply_of(*reference, batch);
    for (Isa isa : toy::kernel_sets()) {
      for (WeightsLayout layout : {WeightsLayout::kPacked, WeightsLayout::kMapped}) {
        const auto layer =
            toy::layer_of(isa, spec, 1, WeightFormat::kFp8E4m3B128, kDefaultNumerics, 1, layout);
        REQUIRE(layer->load_expert(0, weights, progress).ok());
        CHECK(reply_of(*layer, batch) == expected);
        if (layout == WeightsLayout::kPacked)
          CHECK(layer->content_checksum(0) == reference->content_checksum(0));
      }
    }
  }
}

}  // namespace
}  // namespace dflash::compute
