// Copies and products, done at once or at their wait. A product reads its operands' bytes where the
// descriptors say: address, stride and swizzle as in the PTX ISA, 9.7.15.5.1 "Register Fragments
// and Shared Memory Matrix Layouts".
// SPDX-License-Identifier: Apache-2.0
#include "cards/sim/async_work.h"

#include <cmath>
#include <cstring>

namespace dflash::compute::gpu::sim {
namespace {

constexpr uint32_t kUnit = 16;
constexpr uint32_t kWarpgroup = 128;

void mark(const void* at, Site site) {
  const uint32_t address = shared_address(at, site), thread = thread_place().thread;
  if (address % kUnit != 0)
    fail_thread("a unit of an operand is not aligned to 16 bytes: address", address, site);
  block_async_work().writers[address] = thread;
  own_async_work().unfenced.push_back(address);
}

void perform(const UnitCopy& copy) {
  if (copy.from == nullptr)
    std::memset(copy.to, 0, kUnit);
  else
    std::memcpy(copy.to, copy.from, kUnit);
}

// "Matrix Descriptor Format".
struct Descriptor {
  uint32_t start, stride, base_offset, swizzle;
  explicit Descriptor(uint64_t bits)
      : start(static_cast<uint32_t>(bits & 0x3fff) << 4),
        stride(static_cast<uint32_t>(bits >> 32 & 0x3fff) << 4),
        base_offset(static_cast<uint32_t>(bits >> 49 & 7)),
        swizzle(static_cast<uint32_t>(bits >> 62)) {}
};

// Eight inputs of one row: octet 0 or 1 of 16.
const uint16_t* operand_unit(const Descriptor& operand, uint32_t row, uint32_t octet, Site site) {
  const uint32_t plain = operand.start + row / 8 * operand.stride + row % 8 * 128 + octet * kUnit;
  // Swizzle<3, 4, 3> of the address in bytes
  const uint32_t address = plain ^ (plain >> 7 & 7) << 4;
  const auto& writers = block_async_work().writers;
  if (const auto found = writers.find(address); found != writers.end()) {
    fail_thread("an operand that was stored without a fence for asynchronous readers, by thread",
                found->second, site);
  }
  return static_cast<const uint16_t*>(shared_at(address, kUnit, site));
}

float widened(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Ascending inputs, one fma each, as the simulator's other tiles.
void perform(const Product& product) {
  const Descriptor rows(product.rows), outputs(product.outputs);
  const uint32_t thread = thread_place().thread % kWarpgroup, lane = thread % 32;
  const uint16_t* inputs[2][2];
  for (uint32_t at = 0; at < 4; ++at) {
    inputs[at / 2][at % 2] =
        operand_unit(rows, thread / 32 * 16 + lane / 4 + at / 2 * 8, at % 2, product.site);
  }
  for (uint32_t i = 0; i < product.num_outputs / 2; ++i) {
    const uint32_t output = i / 4 * 8 + lane % 4 * 2 + i % 2;
    float sum = product.sums[i];
    for (uint32_t octet = 0; octet < 2; ++octet) {
      const uint16_t* factors = operand_unit(outputs, output, octet, product.site);
      for (uint32_t k = 0; k < 8; ++k)
        sum = std::fma(widened(factors[k]), widened(inputs[i / 2 % 2][octet][k]), sum);
    }
    product.sums[i] = sum;
  }
}

template <class Work>
void ask(AsyncGroups<Work>& groups, const Work& work) {
  if (block_async_work().is_late)
    groups.open.push_back(work);
  else
    perform(work);
}

template <class Work>
void commit(AsyncGroups<Work>& groups) {
  groups.committed.push_back(std::move(groups.open));
  groups.open.clear();
}

template <class Work>
void wait(AsyncGroups<Work>& groups, uint32_t most) {
  while (groups.committed.size() > most) {
    for (const Work& work : groups.committed.front()) perform(work);
    groups.committed.erase(groups.committed.begin());
  }
}

void check_descriptor(const Descriptor& operand, Site site) {
  if (operand.swizzle != 1)
    fail_thread("only the 128-byte swizzle is simulated, not mode", operand.swizzle, site);
  if (operand.base_offset != 0)
    fail_thread("only patterns that begin at multiples of 1024 are simulated, not base offset",
                operand.base_offset, site);
  if (operand.stride % 1024 != 0)
    fail_thread("eight rows of 128 bytes repeat the swizzle, not a stride of", operand.stride,
                site);
}

}  // namespace

void copy_unit_async(void* to, const void* from, Site site) {
  mark(to, site);
  ask(own_async_work().copies, {to, from});
}
void commit_copies() { commit(own_async_work().copies); }
void wait_copies(uint32_t most) { wait(own_async_work().copies, most); }

void store_operand(void* to, const void* from, Site site) {
  mark(to, site);
  std::memcpy(to, from, kUnit);
}

// What was copied or stored by this thread; a copy that is still on its way when fenced shows by
// its late bytes.
void fence_operands() {
  AsyncWork& own = own_async_work();
  AsyncShared& shared = block_async_work();
  const uint32_t thread = thread_place().thread;
  for (const uint32_t address : own.unfenced) {
    const auto found = shared.writers.find(address);
    if (found != shared.writers.end() && found->second == thread) shared.writers.erase(found);
  }
  own.unfenced.clear();
}

void fence_products(Site site) {
  subgroup_collective(Collective::kBarrier, 0, 0, site);
  own_async_work().is_fenced = true;
}

void multiply_async(float* sums, uint32_t num_outputs, uint64_t rows, uint64_t outputs, Site site) {
  subgroup_collective(Collective::kBarrier, 0, 0, site);
  AsyncWork& own = own_async_work();
  if (!own.is_fenced)
    fail_thread("a product without wgmma.fence since the last group, number", own.num_products,
                site);
  check_descriptor(Descriptor(rows), site);
  check_descriptor(Descriptor(outputs), site);
  const uint64_t number = uint64_t{thread_place().thread / kWarpgroup} << 32 | own.num_products++;
  const auto [first, is_new] = block_async_work().asked.try_emplace(number, rows, outputs);
  if (!is_new && first->second != std::pair(rows, outputs))
    fail_thread("threads of a warpgroup differ in product", own.num_products - 1, site);
  ask(own.products, {rows, outputs, sums, num_outputs, site});
}

void commit_products(Site site) {
  subgroup_collective(Collective::kBarrier, 0, 0, site);
  commit(own_async_work().products);
  own_async_work().is_fenced = false;
}

void wait_products(uint32_t most, Site site) {
  subgroup_collective(Collective::kBarrier, 0, 0, site);
  wait(own_async_work().products, most);
}

}  // namespace dflash::compute::gpu::sim
