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
#include "failed.h"

namespace dflash::compute::gpu {
namespace {

using toy::Batch;
using toy::Experts;
using toy::StoredExperts;
using toy::Twins;

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
    CHECK(outcome_of(Fault::kNoProxyFence, copies).error ==
          Has{"stored without a fence for asynchronous readers"});
  CHECK(outcome_of(Fault::kNoFence, false).error == Has{"a product without wgmma.fence"});
  CHECK(outcome_of(Fault::kDescriptor, false).error == Has{"not a stride of 1056"});
  CHECK(outcome_of(Fault::kUneven, false).error ==
        Has{"threads of a warpgroup differ in product 0"});
}

// Cards of the class with the instructions; every layer has threads in another order.
toy::Machines with_warpgroups() {
  const auto create = [seed = uint64_t{0}](const FfnSpec& spec, uint32_t num_experts,
                                           ResidentFormats formats) mutable {
    SimulatedDevice card{.memory_bytes = uint64_t{1} << 28, .seed = ++seed};
    card.has_warpgroups = true;
    return std::shared_ptr<ExpertLayer>(
        layer_on(device_of(card), spec, num_experts, formats, NumericsClass::kBf16Mma));
  };
  return {NumericsClass::kBf16Mma, {{"warpgroups", create}}};
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
  const std::vector<toy::Shape> shapes = {
      {1,    1,   1  },
      {63,   65,  127},
      {64,   64,  128},
      {257,  130, 129},
      {600,  97,  260},
      {1030, 40,  33 }
  };
  uint32_t seed = 10;
  for (const toy::Shape& shape : shapes) {
    FfnSpec spec = toy::spec_of(shape.in, shape.intermediate, shape.out);
    spec.gate = ++seed % 2 == 0 ? GateKind::kNone : GateKind::kGated;
    const auto dtype = static_cast<Dtype>(seed % 3);
    const Experts experts(spec, 3, dtype, seed);
    CAPTURE(shape.in);
    Twins(with_warpgroups(), experts, dtype).check(crowded(spec, 3, 70, 1, seed));
  }
}

TEST_CASE("warpgroups: every weight format gives the class's bits") {
  uint32_t seed = 500;
  for (WeightFormat format : kCardFormats) {
    const WeightFormat source = toy::source_of(format);
    const StoredExperts experts(toy::uneven_spec_of(format), 2, source, source, ++seed);
    CAPTURE(format_name(format));
    Twins(with_warpgroups(), experts, format).check(crowded(experts.spec(), 2, 20, 1, seed));
  }
}

TEST_CASE(
    "warpgroups: any number of rows, in one tile, two or more, next to other experts' tiles, gives "
    "the class's bits in any order of threads") {
  FfnSpec spec = toy::spec_of(300, 70, 40);
  spec.has_gate_up_bias = spec.has_down_bias = true;
  const Experts experts(spec, 5, Dtype::kBF16, 5);
  const toy::Machines machines = with_warpgroups();
  uint32_t seed = 0;
  for (uint32_t rows : {17u, 64u, 65u, 128u, 129u, 260u}) {
    const Twins twins(machines, experts, Dtype::kBF16);
    for (uint16_t id : {uint16_t{0}, uint16_t{3}}) {
      CAPTURE(id);
      twins.check(crowded(spec, 5, rows, id, ++seed));
    }
  }
}

}  // namespace
}  // namespace dflash::compute::gpu
