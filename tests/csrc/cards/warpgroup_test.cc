// Products by warpgroups in the simulator: operands laid out by the formulas of
// kernels/warpgroup_layout.h
// multiply right, each way to lay them out, fence or wait wrongly shows; and the kernel that uses
// them gives the bits of the class's other kernels.
// SPDX-License-Identifier: Apache-2.0
#define DFLASH_GPU_SIM 1
#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "cards/card_scene.h"
#include "cards/kernels/async_copy.h"
#include "cards/kernels/convert_floats.h"
#include "cards/kernels/warpgroup.h"
#include "cards/sim/block.h"

namespace dflash::compute::gpu {
namespace {

using toy::Batch;
using toy::Experts;
using toy::reply_of;
using toy::StoredExperts;

constexpr uint32_t kInputs = 64;

// 64 rows and 128 outputs of 64 inputs, as bf16, and what the block makes of them.
struct Matrices {
  std::vector<uint16_t> rows, outputs;
  std::vector<float> sums;  // [row, output]
  explicit Matrices(uint32_t seed) : sums(size_t{kWarpgroupRows} * kWarpgroupOutputs, -1.0f) {
    std::mt19937 random(seed);
    for (uint32_t i = 0; i < kWarpgroupRows * kInputs; ++i)
      rows.push_back(static_cast<uint16_t>(0x3f00u + random() % 0x100u));
    for (uint32_t i = 0; i < kWarpgroupOutputs * kInputs; ++i)
      outputs.push_back(static_cast<uint16_t>(0xbf00u + random() % 0x100u));
  }
  float expected(uint32_t row, uint32_t output) const {
    float sum = 0.0f;
    for (uint32_t k = 0; k < kInputs; ++k)
      sum = std::fma(widen_bf16(outputs[output * kInputs + k]), widen_bf16(rows[row * kInputs + k]),
                     sum);
    return sum;
  }
};

enum class Fault : uint8_t {
  kNone,
  kNoSwizzle,
  kNoProxyFence,
  kNoFence,
  kNoWait,
  kNoCopyWait,
  kTooEarly,
  kDescriptor,
  kUneven
};

struct Probe {
  Matrices* matrices;
  Fault fault;
  bool copies;
};

struct Operands {
  SharedArray<Unit, kWarpgroupRows * kOperandOctets> rows;
  SharedArray<Unit, kWarpgroupOutputs * kOperandOctets> outputs;
};

void bring(const Probe& probe, Operands& operands) {
  for (uint32_t i = thread_index(); i < (kWarpgroupRows + kWarpgroupOutputs) * kOperandOctets;
       i += kWarpgroupThreads) {
    const bool is_row = i < kWarpgroupRows * kOperandOctets;
    const uint32_t at = is_row ? i : i - kWarpgroupRows * kOperandOctets,
                   unit = operand_unit(at / kOperandOctets, at % kOperandOctets);
    const uint32_t place = probe.fault == Fault::kNoSwizzle ? at : unit;
    Unit& to = is_row ? operands.rows.at(place) : operands.outputs.at(place);
    const uint16_t* from =
        (is_row ? probe.matrices->rows : probe.matrices->outputs).data() + at * 8;
    Unit unit_value;
    std::memcpy(&unit_value, from, sizeof(unit_value));
    if (probe.copies)
      copy_async(to, from);
    else
      Warpgroup::store(to, unit_value);
  }
  commit_copies();
  if (probe.fault != Fault::kNoCopyWait) wait_copies<0>();
  if (probe.fault != Fault::kNoProxyFence) Warpgroup::fence_operands();
}

void multiply(const void* params) {
  const auto& probe = *static_cast<const Probe*>(params);
  GPU_DYNAMIC_SHARED(memory);
  const uint32_t past = Warpgroup::address(*static_cast<Unit*>(memory)) % kOperandAlignment;
  auto& operands = *reinterpret_cast<Operands*>(static_cast<unsigned char*>(memory) +
                                                (kOperandAlignment - past) % kOperandAlignment);
  bring(probe, operands);
  sync_block();
  WarpgroupSums sums;
  if (probe.fault != Fault::kNoFence) Warpgroup::fence();
  for (uint32_t k = 0; k < kInputs / kProductInputs; ++k) {
    uint64_t rows = operand_descriptor(Warpgroup::address(operands.rows.at(0)), k);
    if (probe.fault == Fault::kDescriptor) rows ^= uint64_t{2} << 32;  // a stride of 1056 bytes
    if (probe.fault == Fault::kUneven && subgroup_index() == 3) rows += 1;
    Warpgroup::multiply_add(sums, rows,
                            operand_descriptor(Warpgroup::address(operands.outputs.at(0)), k));
  }
  Warpgroup::commit();
  if (probe.fault == Fault::kTooEarly) operands.rows.at(thread_index()) = Unit{};
  if (probe.fault != Fault::kNoWait) Warpgroup::wait<0>(sums);
  for (uint32_t i = 0; i < kWarpgroupSums; ++i) {
    probe.matrices->sums[warpgroup_row(i) * kWarpgroupOutputs + warpgroup_output(i)] =
        sums.values[i];
  }
}

struct Outcome {
  uint32_t num_wrong = 0;
  std::string error;
};

// Two blocks one after the other: asynchronous work done at once, and as late as may be.
Outcome outcome_of(Fault fault, bool copies) {
  Outcome outcome;
  auto block = sim::Block::create(32, 3).value();
  for (uint32_t turn = 0; turn < 2; ++turn) {
    Matrices matrices(turn + 1);
    const Probe probe{&matrices, fault, copies};
    block->start({&multiply, &probe, "probe", kWarpgroupThreads, 0, 0, 1,
                  static_cast<uint32_t>(sizeof(Operands)) + kOperandAlignment});
    for (bool is_done = false; !is_done;) {
      auto advanced = block->advance();
      if (!advanced.ok()) return {outcome.num_wrong, advanced.error().message};
      is_done = advanced.value();
    }
    for (uint32_t row = 0; row < kWarpgroupRows; ++row) {
      for (uint32_t output = 0; output < kWarpgroupOutputs; ++output) {
        outcome.num_wrong +=
            matrices.sums[row * kWarpgroupOutputs + output] != matrices.expected(row, output) ? 1
                                                                                              : 0;
      }
    }
  }
  return outcome;
}

bool says(const Outcome& outcome, const char* part) {
  return outcome.error.find(part) != std::string::npos;
}

TEST_CASE("warpgroups: a descriptor's fields lie where the instruction set's document puts them") {
  const uint64_t first = operand_descriptor(0x12400, 0), third = operand_descriptor(0x12400, 2);
  CHECK((first & 0x3fff) == 0x1240);           // start address / 16
  CHECK((first >> 16 & 0x3fff) == 1);          // leading dimension: unused, taken as 1
  CHECK((first >> 32 & 0x3fff) == 1024 / 16);  // from eight rows to the next
  CHECK((first >> 49 & 7) == 0);               // base offset
  CHECK((first >> 62) == 1);                   // 128-byte swizzle
  const uint64_t unused = first & 0x3ff1'c000'c000'c000;
  CHECK(unused == 0);
  CHECK(third - first == 2 * 32 / 16);
}

TEST_CASE(
    "warpgroups: eight rows of 128 bytes hold each unit once, and no column of units meets a bank "
    "twice") {
  for (uint32_t octet = 0; octet < kOperandOctets; ++octet) {
    uint32_t banks = 0;
    for (uint32_t row = 0; row < 8; ++row) banks |= 1u << operand_unit(row, octet) % 8;
    CHECK(banks == 0xff);
  }
  CHECK(operand_unit(0, 5) == 5);
  CHECK(operand_unit(3, 5) == 3 * 8 + 6);
  CHECK(operand_unit(9, 0) == 9 * 8 + 1);
}

TEST_CASE(
    "warpgroups: the threads' sums cover 64 x 128 once and are the products, stored or copied") {
  for (bool copies : {false, true}) {
    const Outcome outcome = outcome_of(Fault::kNone, copies);
    CHECK(outcome.error.empty());
    CHECK(outcome.num_wrong == 0);
  }
}

TEST_CASE(
    "warpgroups: operands without the swizzle, waits left out and operands overwritten too early "
    "give wrong sums") {
  CHECK(outcome_of(Fault::kNoSwizzle, false).num_wrong > 10000);
  // of the block whose work is done late
  CHECK(outcome_of(Fault::kNoWait, false).num_wrong > 4000);
  CHECK(outcome_of(Fault::kTooEarly, false).num_wrong > 1000);
  CHECK(outcome_of(Fault::kNoCopyWait, true).num_wrong > 4000);
}

TEST_CASE(
    "warpgroups: missing fences, unlike descriptors and strides that break the pattern are "
    "errors") {
  for (bool copies : {false, true})
    CHECK(says(outcome_of(Fault::kNoProxyFence, copies),
               "stored without a fence for asynchronous readers"));
  CHECK(says(outcome_of(Fault::kNoFence, false), "a product without wgmma.fence"));
  CHECK(says(outcome_of(Fault::kDescriptor, false), "not a stride of 1056"));
  CHECK(says(outcome_of(Fault::kUneven, false), "threads of a warpgroup differ in product 0"));
}

std::unique_ptr<ExpertLayer> layer_with(const FfnSpec& spec, uint32_t num_experts,
                                        ResidentFormats formats, bool has_warpgroups,
                                        uint64_t seed) {
  SimulatedDevice card{.memory_bytes = uint64_t{1} << 28, .seed = seed};
  card.has_warpgroups = has_warpgroups;
  return layer_on(device_of(card), spec, num_experts, formats, NumericsClass::kBf16Mma);
}

// A batch of which expert `id` gets every row, and the next expert every second one.
Batch crowded(const FfnSpec& spec, uint32_t num_experts, uint32_t rows, uint16_t id,
              uint32_t seed) {
  Batch batch = Batch::random(spec, num_experts, rows, 0, seed);
  for (uint32_t row = 0; row < rows; ++row) {
    batch.row_counts[row] = static_cast<uint16_t>(1 + row % 2);
    batch.ids.push_back(id);
    if (row % 2 == 1) batch.ids.push_back(static_cast<uint16_t>((id + 1) % num_experts));
  }
  for (size_t i = 0; i < batch.ids.size(); ++i)
    batch.weights.push_back(0.25f + static_cast<float>(i % 5) / 8.0f);
  return batch;
}

TEST_CASE(
    "warpgroups: shapes that end inside a step, a chain, a panel or a block's columns give the "
    "class's bits") {
  struct Shape {
    uint32_t in, intermediate, out;
  };
  const Shape shapes[] = {
      {1,    1,   1  },
      {63,   65,  127},
      {64,   64,  128},
      {257,  130, 129},
      {600,  97,  260},
      {1030, 40,  33 }
  };
  uint32_t seed = 10;
  for (const Shape& shape : shapes) {
    FfnSpec spec;
    spec.in_size = shape.in;
    spec.intermediate_size = shape.intermediate;
    spec.out_size = shape.out;
    spec.gate = ++seed % 2 == 0 ? GateKind::kNone : GateKind::kGated;
    const auto dtype = static_cast<Dtype>(seed % 3);
    const Experts experts(spec, 3, dtype, seed);
    const auto reference = make_reference_layer(spec, 3, dtype, NumericsClass::kBf16Mma);
    const auto layer = layer_with(spec, 3, dtype, true, seed);
    REQUIRE(experts.load_into(*reference).ok());
    REQUIRE(experts.load_into(*layer).ok());
    const Batch batch = crowded(spec, 3, 70, 1, seed);
    CAPTURE(shape.in);
    CHECK(reply_of(*layer, batch) == reply_of(*reference, batch));
  }
}

TEST_CASE("warpgroups: every weight format gives the class's bits") {
  uint32_t seed = 500;
  for (WeightFormat format : kCardFormats) {
    const WeightFormat source = format_facts(format).is_stored ? format : WeightFormat::kBF16;
    const bool is_wide = format_facts(format).block == 256;
    FfnSpec spec;
    spec.in_size = is_wide ? 512 : 288;
    spec.intermediate_size = is_wide ? 256 : 96;
    spec.out_size = 33;
    const StoredExperts experts(spec, 2, source, source, ++seed);
    const auto plain = layer_with(spec, 2, format, false, seed);
    const auto layer = layer_with(spec, 2, format, true, seed + 1);
    REQUIRE(experts.load_into(*plain).ok());
    REQUIRE(experts.load_into(*layer).ok());
    const Batch batch = crowded(spec, 2, 20, 1, seed);
    CAPTURE(format_name(format));
    CHECK(reply_of(*layer, batch) == reply_of(*plain, batch));
  }
}

TEST_CASE(
    "warpgroups: any number of rows, in one tile, two or more, next to other experts' tiles, gives "
    "the class's bits in any order of threads") {
  FfnSpec spec;
  spec.in_size = 300;
  spec.intermediate_size = 70;
  spec.out_size = 40;
  spec.has_gate_up_bias = spec.has_down_bias = true;
  const Experts experts(spec, 5, Dtype::kBF16, 5);
  const auto plain = layer_with(spec, 5, Dtype::kBF16, false, 1);
  REQUIRE(experts.load_into(*plain).ok());
  uint64_t seed = 0;
  for (uint32_t rows : {17u, 64u, 65u, 128u, 129u, 260u}) {
    const auto layer = layer_with(spec, 5, Dtype::kBF16, true, ++seed);
    REQUIRE(experts.load_into(*layer).ok());
    for (uint16_t id : {uint16_t{0}, uint16_t{3}}) {
      const Batch batch = crowded(spec, 5, rows, id, static_cast<uint32_t>(seed));
      CAPTURE(rows);
      CAPTURE(id);
      CHECK(reply_of(*layer, batch) == reply_of(*plain, batch));
    }
  }
}

}  // namespace
}  // namespace dflash::compute::gpu
