// Seeded experts in any stored weight format: random valid bits with scales in a sensible range.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "toy_experts.h"

namespace dflash::compute::toy {

struct StoredMatrix {
  std::vector<std::byte> values, scales;
  MatrixView view;  // into the two, which never move after construction
};

inline void put_f16(std::byte* at, float value) {
  const uint16_t bits = f32_to_f16(value);
  std::memcpy(at, &bits, sizeof(bits));
}

// The factor of iq1_m lies in the top bits of four u16.
inline void put_iq1_m_scale(std::byte* block, float value) {
  const uint16_t bits = f32_to_f16(value);
  for (uint32_t i = 0; i < 4; ++i) {
    std::byte& top = block[49 + 2 * i];
    top = (top & std::byte{15}) | static_cast<std::byte>((bits >> (4 * i) & 15) << 4);
  }
}

class StoredExperts {
 public:
  StoredExperts(const FfnSpec& spec, uint32_t count, WeightFormat gate_up, WeightFormat down,
                uint32_t seed)
      : spec_(spec), random_(seed) {
    for (uint32_t id = 0; id < count; ++id) {
      experts_.push_back({make(gate_up, spec.intermediate_size, spec.in_size),
                          make(gate_up, spec.intermediate_size, spec.in_size),
                          make(down, spec.out_size, spec.intermediate_size)});
    }
  }

  ExpertWeights weights(uint32_t id) const {
    ExpertWeights found;
    found.gate = experts_[id].gate->view;
    found.up = experts_[id].up->view;
    found.down = experts_[id].down->view;
    return found;
  }
  Status load_into(ExpertLayer& layer) const {
    YieldingProgress progress{0};
    for (uint32_t id = 0; id < experts_.size(); ++id)
      DFLASH_TRY(layer.load_expert(id, weights(id), progress));
    return ok();
  }

  const FfnSpec& spec() const { return spec_; }
  uint32_t count() const { return static_cast<uint32_t>(experts_.size()); }

  // Makes one scale (or one value, where weights are stored as floats) of the first expert's down
  // matrix infinite or NaN.
  void damage_down(uint32_t output) {
    StoredMatrix& matrix = *experts_[0].down;
    std::byte* row = matrix.values.data() +
                     output * matrix.view.output_stride * (is_float(matrix.view.format) ? 2 : 1);
    switch (matrix.view.format) {
      case WeightFormat::kMxfp4:
        matrix.scales[static_cast<size_t>(output * matrix.view.scales_stride) + 1] = std::byte{255};
        break;
      case WeightFormat::kFp8E4m3B128: row[200] = std::byte{0xff}; break;
      case WeightFormat::kGgufMxfp4:   row[0] = std::byte{255}; break;
      case WeightFormat::kQ6K:         put_f16(row + 208, INFINITY); break;
      case WeightFormat::kIq1M:        put_iq1_m_scale(row, INFINITY); break;
      case WeightFormat::kTq1_0:       put_f16(row + 52, INFINITY); break;
      case WeightFormat::kTq2_0:       put_f16(row + 64, INFINITY); break;
      case WeightFormat::kQ3K:         put_f16(row + 108, INFINITY); break;
      case WeightFormat::kQ2K:         put_f16(row + 82, INFINITY); break;
      case WeightFormat::kQ4K:
      case WeightFormat::kQ5K:
      case WeightFormat::kQ4_1:
      case WeightFormat::kQ5_1:        put_f16(row + 2, INFINITY); break;
      case WeightFormat::kInt4Zp:      row[2] = std::byte{0x80}, row[3] = std::byte{0x7f}; break;
      case WeightFormat::kBF16:        row[0] = row[1] = std::byte{0xff}; break;
      default:                         put_f16(row, INFINITY); break;
    }
  }

 private:
  struct Expert {
    std::unique_ptr<StoredMatrix> gate, up, down;
  };

  float scale(float size) {
    return size * (0.5f + static_cast<float>(random_() % 1000) / 1000.0f) *
           (random_() % 2 == 0 ? 1.0f : -1.0f);
  }

  // Sensible scales over random bits, so that sums neither vanish nor overflow.
  void put_scales(WeightFormat format, std::byte* block) {
    switch (format) {
      case WeightFormat::kQ4K:
      case WeightFormat::kQ5K:
        put_f16(block, scale(0.0005f));
        put_f16(block + 2, scale(0.002f));
        break;
      case WeightFormat::kQ6K: put_f16(block + 208, scale(0.0001f)); break;
      case WeightFormat::kGgufMxfp4:
        block[0] = static_cast<std::byte>(random_() % 20 == 0 ? 0 : 118 + random_() % 6);
        break;
      case WeightFormat::kIq4Xs: put_f16(block, scale(0.0001f)); break;
      case WeightFormat::kQ4_1:
      case WeightFormat::kQ5_1:
        put_f16(block, scale(0.002f));
        put_f16(block + 2, scale(0.01f));
        break;
      case WeightFormat::kIq3Xxs:
      case WeightFormat::kIq3S:
      case WeightFormat::kIq2Xxs:
      case WeightFormat::kIq2Xs:
      case WeightFormat::kIq2S:   put_f16(block, scale(0.0004f)); break;
      case WeightFormat::kIq1S:   put_f16(block, scale(0.01f)); break;
      case WeightFormat::kIq1M:   put_iq1_m_scale(block, scale(0.01f)); break;
      case WeightFormat::kTq1_0:  put_f16(block + 52, scale(0.05f)); break;
      case WeightFormat::kTq2_0:  put_f16(block + 64, scale(0.05f)); break;
      case WeightFormat::kNvfp4:
        for (int i = 0; i < 4; ++i) block[i] = static_cast<std::byte>(random_() % 40);
        break;
      case WeightFormat::kQ3K: put_f16(block + 108, scale(0.0005f)); break;
      case WeightFormat::kQ2K:
        put_f16(block + 80, scale(0.0015f));
        put_f16(block + 82, scale(0.002f));
        break;
      case WeightFormat::kInt4Zp: {
        // The five lowest bits, the zero point, stay random.
        const auto word = std::bit_cast<uint32_t>(f16_to_f32(f32_to_f16(scale(0.002f))));
        const uint32_t zero = std::to_integer<uint32_t>(block[0]) & 31u, both = word | zero;
        std::memcpy(block, &both, sizeof(both));
        break;
      }
      default: put_f16(block, scale(0.002f)); break;
    }
  }

  std::unique_ptr<StoredMatrix> make(WeightFormat format, uint32_t outputs, uint32_t inputs) {
    auto matrix = std::make_unique<StoredMatrix>();
    const FormatFacts& facts = format_facts(format);
    const uint64_t bytes = row_bytes(format, inputs);
    matrix->view = {nullptr, format, outputs, inputs, static_cast<int64_t>(bytes), 0};
    if (is_float(format)) {
      matrix->values =
          encode(dtype_of(format), random_floats(random_, size_t{outputs} * inputs, 0.06f));
      matrix->view.output_stride = inputs;
      matrix->view.input_stride = 1;
    } else {
      matrix->values.resize(outputs * bytes);
      for (std::byte& byte : matrix->values) byte = static_cast<std::byte>(random_());
      fill_scales(*matrix, facts);
    }
    matrix->view.data = matrix->values.data();
    return matrix;
  }

  void fill_scales(StoredMatrix& matrix, const FormatFacts& facts) {
    const MatrixView& view = matrix.view;
    if (facts.scale_bytes == 0) {
      for (size_t at = 0; at < matrix.values.size(); at += facts.block_bytes)
        put_scales(view.format, matrix.values.data() + at);
      return;
    }
    const uint32_t rows = (view.outputs + facts.scale_outputs - 1) / facts.scale_outputs;
    const uint32_t columns = (view.inputs + facts.scale_inputs - 1) / facts.scale_inputs;
    if (view.format == WeightFormat::kFp8E4m3B128) {
      for (std::byte& byte : matrix.values) {
        if ((byte & std::byte{0x7f}) == std::byte{0x7f}) byte = std::byte{0x12};  // no NaN
      }
      matrix.scales = encode(Dtype::kF32, random_floats(random_, size_t{rows} * columns, 0.0005f));
    } else {
      for (uint32_t i = 0; i < rows * columns; ++i)
        matrix.scales.push_back(static_cast<std::byte>(118 + random_() % 6));
    }
    matrix.view.scales = matrix.scales.data();
    matrix.view.scales_stride = columns * facts.scale_bytes;
  }

  FfnSpec spec_;
  std::mt19937 random_;
  std::vector<Expert> experts_;
};

// What a checkpoint holds for a resident format.
inline WeightFormat source_of(WeightFormat format) {
  return format_facts(format).is_stored     ? format
         : format == WeightFormat::kInt4G32 ? WeightFormat::kF16
                                            : WeightFormat::kBF16;
}

// A spec whose widths end inside a chain, a step, a group or a panel, as far as blocks of `format`
// allow.
inline FfnSpec uneven_spec_of(WeightFormat format) {
  const uint32_t block = format_facts(source_of(format)).block;
  return block == 256  ? spec_of(768, 256, 33)
         : block == 32 ? spec_of(288, 96, 33)
                       : spec_of(301, 77, 33);
}

}  // namespace dflash::compute::toy
