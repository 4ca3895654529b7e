// The classes in words: the loops against which the kernels are tested. They are written for
// reading, one fma at a time.
// SPDX-License-Identifier: Apache-2.0
#include "compute/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "base/dtype.h"
#include "base/float_mode.h"
#include "compute/experts/activation.h"
#include "compute/experts/content_checksum.h"
#include "compute/experts/layer_checks.h"
#include "compute/formats/dequantize.h"
#include "compute/formats/plain_rows.h"
#include "compute/reference/class_products.h"
#include "compute/vector_scalar.h"

namespace dflash::compute {
namespace {

struct Expert {
  bool is_loaded = false;
  uint64_t checksum = 0;
  ClassMatrix gate, up, down;
  std::vector<float> gate_bias, up_bias, down_bias;
};

class ReferenceLayer final : public ExpertLayer {
 public:
  ReferenceLayer(const FfnSpec& spec, uint32_t num_local_experts, ResidentFormats formats,
                 NumericsClass numerics)
      : spec_(spec),
        formats_(formats),
        facts_(numerics_facts(numerics)),
        experts_(num_local_experts) {}

  const FfnSpec& spec() const override { return spec_; }
  uint32_t num_local_experts() const override { return static_cast<uint32_t>(experts_.size()); }
  uint64_t resident_bytes() const override {
    uint64_t num_bytes = 0;
    for (const Expert& e : experts_) {
      num_bytes += e.gate.num_bytes() + e.up.num_bytes() + e.down.num_bytes();
      num_bytes += 4 * (e.gate_bias.size() + e.up_bias.size() + e.down_bias.size());
    }
    return num_bytes;
  }

  Status load_expert(uint32_t local_expert_id, const ExpertWeights& weights,
                     YieldingProgress& progress) override {
    DFLASH_TRY(check_expert(spec_, num_local_experts(), local_expert_id, weights));
    Expert& expert = experts_[local_expert_id];
    const CanonicalFloatMode mode;
    ExpertChecksum sums;
    struct Source {
      const char* name;
      const MatrixView& view;
      WeightFormat resident;
      ClassMatrix& matrix;
      MatrixChecksum& sum;
    };
    for (const Source& source : {
             Source{"gate", weights.gate, formats_.gate_up, expert.gate, sums.gate},
             Source{"up",   weights.up,   formats_.gate_up, expert.up,   sums.up  },
             Source{"down", weights.down, formats_.down,    expert.down, sums.down}
    }) {
      if (source.view.data == nullptr) continue;
      std::vector<std::byte> made;
      const MatrixView plain = plain_matrix(source.view, made);
      source.sum.add(plain, 0, 0, plain.outputs);
      auto matrix = class_matrix(source.name, plain, source.resident, facts_);
      if (!matrix.ok()) return std::move(matrix).error();
      source.matrix = std::move(matrix).value();
      // In a worker, the serving thread may move bytes of its data path here.
      progress.count_and_yield();
    }
    expert.gate_bias = widen_vector(weights.gate_bias, spec_.intermediate_size);
    expert.up_bias = widen_vector(weights.up_bias, spec_.intermediate_size);
    expert.down_bias = widen_vector(weights.down_bias, spec_.out_size);
    expert.checksum = sums.finish(weights);
    expert.is_loaded = true;
    return ok();
  }

  std::optional<uint64_t> content_checksum(uint32_t local_expert_id) const override {
    const Expert& expert = experts_[local_expert_id];
    return expert.is_loaded ? std::optional(expert.checksum) : std::nullopt;
  }

  Status forward(const ForwardArgs& args, YieldingProgress& progress) override {
    DFLASH_TRY(check_batch(args, num_local_experts()));
    for (uint16_t id : args.local_expert_ids) {
      if (!experts_[id].is_loaded) {
        return Error{ErrorCode::kInvalidArgument, "local expert " + std::to_string(id) +
                                                      " was not loaded; load it before forward"};
      }
    }
    const CanonicalFloatMode mode;
    size_t first_pair = 0;
    for (uint32_t r = 0; r < args.num_rows; ++r) {
      std::vector<float> values(spec_.in_size);
      widen(args.row_dtype, args.rows + size_t{r} * spec_.in_size * dtype_bytes(args.row_dtype),
            values.data(), values.size());
      const ClassRow row = class_row(facts_, std::move(values));
      const std::vector<float> sum =
          routed_sum(args, first_pair, args.row_counts[r], row, progress);
      first_pair += args.row_counts[r];
      std::byte* reply = args.reply + size_t{r} * spec_.out_size * dtype_bytes(args.reply_dtype);
      if (convert(Dtype::kF32, reinterpret_cast<const std::byte*>(sum.data()), args.reply_dtype,
                  reply, sum.size()))
        continue;
      for (uint32_t c = 0; c < sum.size(); ++c) {
        if (overflows(sum[c], args.reply_dtype)) return range_error(r, c, sum[c], args.reply_dtype);
      }
    }
    return ok();
  }

 private:
  float project(const ClassMatrix& matrix, size_t output, const ClassRow& input,
                const std::vector<float>& bias) const {
    const float sum = class_dot(facts_, matrix, output, input);
    return bias.empty() ? sum : sum + bias[output];
  }

  // Returns y = fma(w, d, y) over the row's pairs: experts ascend, duplicates keep their order.
  std::vector<float> routed_sum(const ForwardArgs& args, size_t first_pair, size_t num_pairs,
                                const ClassRow& row, YieldingProgress& progress) const {
    std::vector<size_t> pairs(num_pairs);
    for (size_t i = 0; i < num_pairs; ++i) pairs[i] = first_pair + i;
    std::stable_sort(pairs.begin(), pairs.end(), [&](size_t a, size_t b) {
      return args.local_expert_ids[a] < args.local_expert_ids[b];
    });
    std::vector<float> sum(spec_.out_size, 0.0f);
    for (size_t pair : pairs) {
      const Expert& expert = experts_[args.local_expert_ids[pair]];
      std::vector<float> hidden(spec_.intermediate_size);
      for (size_t i = 0; i < hidden.size(); ++i) {
        const float g =
            spec_.gate == GateKind::kNone ? 0.0f : project(expert.gate, i, row, expert.gate_bias);
        hidden[i] = gate<ScalarVector>(spec_, g, project(expert.up, i, row, expert.up_bias));
      }
      const ClassRow inputs = class_row(facts_, std::move(hidden));
      // In a worker, the serving thread may move bytes of its data path here.
      progress.count_and_yield();
      for (size_t o = 0; o < sum.size(); ++o) {
        sum[o] = std::fmaf(args.weights[pair], project(expert.down, o, inputs, expert.down_bias),
                           sum[o]);
      }
      // In a worker, the serving thread may move bytes of its data path here.
      progress.count_and_yield();
    }
    for (float& value : sum) {
      // The class has 0x7fc00000 for every NaN, whatever payload an fma has kept.
      if (std::isnan(value)) value = std::numeric_limits<float>::quiet_NaN();
    }
    return sum;
  }

  FfnSpec spec_;
  ResidentFormats formats_;
  const NumericsFacts& facts_;
  std::vector<Expert> experts_;
};

}  // namespace

std::unique_ptr<ExpertLayer> make_reference_layer(const FfnSpec& spec, uint32_t num_local_experts,
                                                  ResidentFormats formats, NumericsClass numerics) {
  return std::make_unique<ReferenceLayer>(spec, num_local_experts, formats, numerics);
}

}  // namespace dflash::compute
