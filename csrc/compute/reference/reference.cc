// f32-canonical in words: the loops that the kernels are tested against. Written for reading; one fma at a time.
// SPDX-License-Identifier: Apache-2.0
#include "compute/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "base/convert.h"
#include "compute/activation.h"
#include "compute/cpu/vector_scalar.h"
#include "compute/float_mode.h"
#include "compute/layer_checks.h"

namespace dflash::compute {
namespace {

constexpr size_t kChain = 256;  // inputs per fma chain

struct Matrix {
  std::vector<float> values;  // [outputs, inputs]
  size_t inputs = 0;
};

Matrix widen_matrix(const MatrixView& view) {
  Matrix matrix{std::vector<float>(size_t{view.outputs} * view.inputs), view.inputs};
  const int64_t element = static_cast<int64_t>(dtype_bytes(view.dtype));
  for (uint32_t o = 0; o < view.outputs; ++o) {
    for (uint32_t i = 0; i < view.inputs; ++i) {
      const std::byte* from = view.data + (o * view.output_stride + i * view.input_stride) * element;
      widen(view.dtype, from, &matrix.values[o * matrix.inputs + i], 1);
    }
  }
  return matrix;
}

// One output: block sums of 256-long fma chains, added in ascending order, then the bias.
float project(const Matrix& matrix, size_t output, const float* input, const std::vector<float>& bias) {
  const float* weights = matrix.values.data() + output * matrix.inputs;
  float total = 0.0f;
  for (size_t begin = 0; begin < matrix.inputs; begin += kChain) {
    float chain = 0.0f;
    for (size_t k = begin; k < std::min(begin + kChain, matrix.inputs); ++k) chain = std::fmaf(weights[k], input[k], chain);
    total = begin == 0 ? chain : total + chain;
  }
  return bias.empty() ? total : total + bias[output];
}

struct Expert {
  bool is_loaded = false;
  Matrix gate, up, down;
  std::vector<float> gate_bias, up_bias, down_bias;
};

class ReferenceLayer final : public ExpertLayer {
 public:
  ReferenceLayer(const FfnSpec& spec, uint32_t num_local_experts) : spec_(spec), experts_(num_local_experts) {}

  const FfnSpec& spec() const override { return spec_; }
  uint32_t num_local_experts() const override { return static_cast<uint32_t>(experts_.size()); }
  uint64_t resident_bytes() const override {
    uint64_t num_floats = 0;
    for (const Expert& e : experts_) {
      num_floats += e.gate.values.size() + e.up.values.size() + e.down.values.size();
      num_floats += e.gate_bias.size() + e.up_bias.size() + e.down_bias.size();
    }
    return 4 * num_floats;
  }

  Status load_expert(uint32_t local_expert_id, const ExpertWeights& weights, ProgressCounter& progress) override {
    DFLASH_TRY(check_expert(spec_, num_local_experts(), local_expert_id, weights));
    Expert& expert = experts_[local_expert_id];
    for (auto [view, matrix] : {std::pair(&weights.gate, &expert.gate), std::pair(&weights.up, &expert.up),
                                std::pair(&weights.down, &expert.down)}) {
      if (view->data != nullptr) *matrix = widen_matrix(*view);
      progress.fetch_add(1, std::memory_order_relaxed);
    }
    expert.gate_bias = widen_vector(weights.gate_bias, spec_.intermediate_size);
    expert.up_bias = widen_vector(weights.up_bias, spec_.intermediate_size);
    expert.down_bias = widen_vector(weights.down_bias, spec_.out_size);
    expert.is_loaded = true;
    return ok();
  }

  Status forward(const ForwardArgs& args, ProgressCounter& progress) override {
    DFLASH_TRY(check_batch(args, num_local_experts()));
    for (uint16_t id : args.local_expert_ids) {
      if (!experts_[id].is_loaded) {
        return Error{ErrorCode::kInvalidArgument, "local expert " + std::to_string(id) + " was not loaded; load it before forward"};
      }
    }
    const CanonicalFloatMode mode;
    std::vector<float> row(spec_.in_size);
    size_t first_pair = 0;
    for (uint32_t r = 0; r < args.num_rows; ++r) {
      widen(args.row_dtype, args.rows + size_t{r} * spec_.in_size * dtype_bytes(args.row_dtype), row.data(), row.size());
      const std::vector<float> sum = routed_sum(args, first_pair, args.row_counts[r], row, progress);
      first_pair += args.row_counts[r];
      std::byte* reply = args.reply + size_t{r} * spec_.out_size * dtype_bytes(args.reply_dtype);
      if (convert(Dtype::kF32, reinterpret_cast<const std::byte*>(sum.data()), args.reply_dtype, reply, sum.size())) continue;
      for (uint32_t c = 0; c < sum.size(); ++c) {
        if (overflows(sum[c], args.reply_dtype)) return range_error(r, c, sum[c], args.reply_dtype);
      }
    }
    return ok();
  }

 private:
  // y = fma(w, d, y) over the row's pairs: experts ascending, duplicates in the order given.
  std::vector<float> routed_sum(const ForwardArgs& args, size_t first_pair, size_t num_pairs, const std::vector<float>& row,
                                ProgressCounter& progress) const {
    std::vector<size_t> pairs(num_pairs);
    for (size_t i = 0; i < num_pairs; ++i) pairs[i] = first_pair + i;
    std::stable_sort(pairs.begin(), pairs.end(),
                     [&](size_t a, size_t b) { return args.local_expert_ids[a] < args.local_expert_ids[b]; });
    std::vector<float> sum(spec_.out_size, 0.0f);
    for (size_t pair : pairs) {
      const Expert& expert = experts_[args.local_expert_ids[pair]];
      std::vector<float> hidden(spec_.intermediate_size);
      for (size_t i = 0; i < hidden.size(); ++i) {
        const float g = spec_.gate == GateKind::kNone ? 0.0f : project(expert.gate, i, row.data(), expert.gate_bias);
        hidden[i] = gate<ScalarVector>(spec_, g, project(expert.up, i, row.data(), expert.up_bias));
      }
      progress.fetch_add(1, std::memory_order_relaxed);
      for (size_t o = 0; o < sum.size(); ++o) {
        sum[o] = std::fmaf(args.weights[pair], project(expert.down, o, hidden.data(), expert.down_bias), sum[o]);
      }
      progress.fetch_add(1, std::memory_order_relaxed);
    }
    for (float& value : sum) {
      if (std::isnan(value)) value = std::numeric_limits<float>::quiet_NaN();  // 0x7fc00000, whatever payload an fma kept
    }
    return sum;
  }

  FfnSpec spec_;
  std::vector<Expert> experts_;
};

}  // namespace

std::unique_ptr<ExpertLayer> make_reference_layer(const FfnSpec& spec, uint32_t num_local_experts) {
  return std::make_unique<ReferenceLayer>(spec, num_local_experts);
}

}  // namespace dflash::compute
