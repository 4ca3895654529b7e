// SPDX-License-Identifier: Apache-2.0
#include "plugin/self_test.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "compute/experts/random_expert.h"
#include "compute/reference/reference.h"

namespace dflash::plugin {
namespace {

using compute::Activation;
using compute::GateKind;
using compute::NumericsClass;
using compute::WeightFormat;

constexpr uint32_t kExperts = 4;
// Rows of a batch, so that both kinds of kernel are tested. The larger number gives, on the
// processor, more rows per expert than a tile of eight has, and on cards more than 16 to the
// experts in the middle, which two of three rows choose.
constexpr uint32_t kFewRows = 3, kManyRows = 36;
constexpr uint32_t kPairsPerRow = 2;
constexpr uint32_t kListedRows = kListedPairs / kPairsPerRow;

struct SpecCase {
  const char* name;
  Activation activation;
  GateKind gate;
};
constexpr SpecCase kSpecs[] = {
    {"silu",           Activation::kSilu,        GateKind::kGated        },
    {"gelu_tanh",      Activation::kGeluTanh,    GateKind::kGated        },
    {"relu_squared",   Activation::kReluSquared, GateKind::kNone         },
    {"clamped_swiglu", Activation::kSilu,        GateKind::kClampedSwiglu}
};

// One case, because the lists are the same for every class and format.
constexpr SpecCase kListing = {"lists of many rows", Activation::kSilu, GateKind::kGated};

struct Case {
  NumericsClass numerics = compute::kDefaultNumerics;
  WeightFormat format = WeightFormat::kF32;
  const SpecCase* spec = nullptr;
};

// Every activation with float weights; the others, whose kernels share it, with one.
std::vector<Case> cases_of(const Device& device) {
  std::vector<Case> cases;
  for (const compute::NumericsFacts& facts : compute::numerics_table()) {
    if (!device.computes(facts.numerics)) continue;
    for (uint8_t value = 0; value < compute::kNumWeightFormats; ++value) {
      const auto format = static_cast<WeightFormat>(value);
      if (!device.takes(format) || !facts.takes(format)) continue;
      for (const SpecCase& spec : kSpecs) {
        if (compute::is_float(format) || &spec == kSpecs)
          cases.push_back({facts.numerics, format, &spec});
      }
    }
  }
  if (device.computes(compute::kDefaultNumerics) && device.takes(WeightFormat::kF32)) {
    cases.push_back({compute::kDefaultNumerics, WeightFormat::kF32, &kListing});
  }
  return cases;
}

bool is_listing(const Case& chosen) { return chosen.spec == &kListing; }

// Widths above one block of 256; float weights in widths that no vector and no tile divides.
compute::FfnSpec spec_for(const Case& chosen) {
  const bool is_whole = !compute::is_float(chosen.format);
  compute::FfnSpec spec;
  spec.in_size = is_whole ? 512 : is_listing(chosen) ? 20 : 300;
  spec.intermediate_size = is_whole ? 256 : is_listing(chosen) ? 36 : 67;
  spec.out_size = is_whole ? 96 : is_listing(chosen) ? 33 : 91;
  spec.activation = chosen.spec->activation;
  spec.gate = chosen.spec->gate;
  if (spec.gate == GateKind::kClampedSwiglu) {
    spec.alpha = 1.702f;
    spec.up_offset = 1.0f;
    spec.gate_max = spec.up_limit = 7.0f;
  }
  return spec;
}

// A batch of which every row has kPairsPerRow neighbouring experts, ascending.
struct Batch {
  std::vector<std::byte> rows, reply;
  std::vector<uint16_t> counts, ids;
  std::vector<float> weights;
  compute::ForwardArgs args;

  Batch(const compute::FfnSpec& spec, uint32_t num_rows, Dtype dtype, std::mt19937_64& random) {
    const auto unit = [&random] {
      return static_cast<float>(static_cast<int32_t>(random() >> 40) - (1 << 23)) / (1 << 23);
    };
    std::vector<float> values(size_t{num_rows} * spec.in_size);
    for (float& value : values) value = unit();
    rows.resize(values.size() * dtype_bytes(dtype));
    convert(Dtype::kF32, reinterpret_cast<const std::byte*>(values.data()), dtype, rows.data(),
            values.size());
    reply.resize(size_t{num_rows} * spec.out_size * dtype_bytes(dtype));
    for (uint32_t row = 0; row < num_rows; ++row) {
      counts.push_back(kPairsPerRow);
      const auto first = static_cast<uint16_t>(random() % (kExperts - kPairsPerRow + 1));
      for (uint16_t pair = 0; pair < kPairsPerRow; ++pair) {
        ids.push_back(static_cast<uint16_t>(first + pair));
        weights.push_back(unit());
      }
    }
    args.rows = rows.data();
    args.row_dtype = args.reply_dtype = dtype;
    args.num_rows = num_rows;
    args.row_counts = counts;
    args.local_expert_ids = ids;
    args.weights = weights;
    args.reply = reply.data();
  }
};

uint64_t count_differing(const std::vector<std::byte>& left, const std::vector<std::byte>& right,
                         size_t element_bytes) {
  uint64_t differing = 0;
  for (size_t at = 0; at < left.size(); at += element_bytes) {
    differing += std::memcmp(left.data() + at, right.data() + at, element_bytes) != 0;
  }
  return differing;
}

// How many elements of a reply are outside of a class's bounds, which are rounded as the reply is.
uint64_t count_outside(const compute::OutputBounds& bounds, const std::vector<std::byte>& reply,
                       Dtype dtype) {
  const auto rounded = [dtype](double bound) {
    const auto wide = static_cast<float>(bound);
    std::byte narrow[sizeof(float)];
    float value = 0.0f;
    convert(Dtype::kF32, reinterpret_cast<const std::byte*>(&wide), dtype, narrow, 1);
    widen(dtype, narrow, &value, 1);
    return value;
  };
  std::vector<float> found(bounds.low.size());
  widen(dtype, reply.data(), found.data(), found.size());
  uint64_t outside = 0;
  for (size_t at = 0; at < found.size(); ++at) {
    // Written so that a NaN is outside.
    const bool is_inside =
        rounded(bounds.low[at]) <= found[at] && found[at] <= rounded(bounds.high[at]);
    outside += is_inside ? 0 : 1;
  }
  return outside;
}

// How many elements of the first rows' reply change when these rows come alone, which another
// kernel computes. A class promises that none does, and bounds cannot show it.
Result<uint64_t> count_unlike_alone(compute::ExpertLayer& layer, const Batch& batch,
                                    const std::vector<std::byte>& found) {
  compute::ForwardArgs args = batch.args;
  args.num_rows = std::min(args.num_rows, kFewRows);
  args.row_counts = args.row_counts.first(args.num_rows);
  args.local_expert_ids = args.local_expert_ids.first(args.num_rows * kPairsPerRow);
  args.weights = args.weights.first(args.num_rows * kPairsPerRow);
  const size_t element_bytes = dtype_bytes(args.reply_dtype);
  std::vector<std::byte> alone(args.num_rows * layer.spec().out_size * element_bytes);
  args.reply = alone.data();
  compute::YieldingProgress progress;
  DFLASH_TRY(layer.forward(args, progress));
  return count_differing(alone, found, element_bytes);
}

// How many elements of the device's reply are wrong: not the reference's bits, or where a class's
// bits are a card's own, outside of its bounds or dependent on the number of rows.
Result<uint64_t> count_wrong(const Case& chosen, compute::ExpertLayer& layer,
                             compute::ExpertLayer& reference,
                             const std::vector<compute::RandomExpert>& experts, Batch& batch) {
  compute::YieldingProgress progress;
  DFLASH_TRY(layer.forward(batch.args, progress));
  const Dtype dtype = batch.args.reply_dtype;
  const std::vector<std::byte> found = batch.reply;
  if (compute::numerics_facts(chosen.numerics).is_bounded()) {
    std::vector<compute::ExpertWeights> weights;
    for (const compute::RandomExpert& expert : experts) weights.push_back(expert.weights());
    auto unlike = count_unlike_alone(layer, batch, found);
    if (!unlike.ok() || unlike.value() != 0) return unlike;
    return count_outside(
        compute::class_bounds(chosen.numerics, layer.spec(), weights, chosen.format, batch.args),
        found, dtype);
  }
  DFLASH_TRY(reference.forward(batch.args, progress));
  return count_differing(batch.reply, found, dtype_bytes(dtype));
}

Status load_all(compute::ExpertLayer& layer, const std::vector<compute::RandomExpert>& experts) {
  compute::YieldingProgress progress;
  for (uint32_t id = 0; id < kExperts; ++id)
    DFLASH_TRY(layer.load_expert(id, experts[id].weights(), progress));
  return ok();
}

}  // namespace

Result<SelfTestResult> run_self_test(Device& device, uint32_t test_case) {
  const std::vector<Case> cases = cases_of(device);
  if (test_case >= cases.size()) {
    return Error{ErrorCode::kInvalidArgument, "self-test " + std::to_string(test_case) +
                                                  " does not exist; this device has " +
                                                  std::to_string(cases.size())};
  }
  const Case& chosen = cases[test_case];
  const compute::FfnSpec spec = spec_for(chosen);
  SelfTestResult result;
  result.num_cases = static_cast<uint32_t>(cases.size());
  result.kernel = std::string(compute::numerics_name(chosen.numerics)) + " " + chosen.spec->name;
  result.formats = compute::format_name(chosen.format);

  std::vector<compute::RandomExpert> experts;
  for (uint32_t id = 0; id < kExperts; ++id)
    experts.emplace_back(spec, chosen.format, uint64_t{test_case} * kExperts + id);
  auto layer = device.backend().create_layer(spec, kExperts, chosen.format, chosen.numerics);
  if (!layer.ok()) return std::move(layer).error();
  const auto reference =
      compute::make_reference_layer(spec, kExperts, chosen.format, chosen.numerics);
  DFLASH_TRY(load_all(*layer.value(), experts));
  DFLASH_TRY(load_all(*reference, experts));

  std::mt19937_64 random(test_case);
  const auto batches = is_listing(chosen) ? std::vector<uint32_t>{kListedRows}
                                          : std::vector<uint32_t>{kFewRows, kManyRows};
  for (uint32_t num_rows : batches) {
    Batch batch(spec, num_rows, static_cast<Dtype>((test_case + num_rows) % kNumDtypes), random);
    auto wrong = count_wrong(chosen, *layer.value(), *reference, experts, batch);
    if (!wrong.ok()) return std::move(wrong).error();
    result.elements += uint64_t{num_rows} * spec.out_size;
    result.differing += wrong.value();
  }
  return result;
}

Status prove_kernels(Device& device, NumericsClass numerics, WeightFormat format) {
  const std::vector<Case> cases = cases_of(device);
  for (uint32_t i = 0; i < cases.size(); ++i) {
    if (!is_listing(cases[i]) && (cases[i].numerics != numerics || cases[i].format != format))
      continue;
    auto tested = run_self_test(device, i);
    if (!tested.ok()) return std::move(tested).error();
    const SelfTestResult& result = tested.value();
    if (result.differing == 0) continue;
    return Error{ErrorCode::kUnsupported,
                 "its kernels compute wrong numbers: " + result.kernel + " with weights in " +
                     result.formats + " differs from the reference in " +
                     std::to_string(result.differing) + " of " + std::to_string(result.elements) +
                     " elements; `dflash-moe doctor --selftest` shows what holds on this device"};
  }
  return ok();
}

}  // namespace dflash::plugin
