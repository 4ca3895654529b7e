// What simulated threads have asked for and not yet waited for: copies into shared memory
// (cp.async) and products of a warpgroup (wgmma). In every second block both are done at once, in
// the others as late as the waits allow, so that reading too early and overwriting too early show.
// Operands must have been fenced by who stored them (fence.proxy.async): a product that reads a
// unit without that ends the block.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "cards/sim/thread_view.h"

namespace dflash::compute::gpu::sim {

// Groups of work in order; the newest is open until it is committed.
template <class Work>
struct AsyncGroups {
  std::vector<std::vector<Work>> committed;
  std::vector<Work> open;
  void clear() {
    committed.clear();
    open.clear();
  }
};

struct UnitCopy {
  void* to;          // 16 bytes of shared memory
  const void* from;  // null: zeros
};

struct Product {
  uint64_t rows, outputs;  // descriptors
  float* sums;             // [num_outputs / 2] of the thread that asked
  uint32_t num_outputs;
  Site site;
};

// Of one thread.
struct AsyncWork {
  AsyncGroups<UnitCopy> copies;
  AsyncGroups<Product> products;
  std::vector<uint32_t> unfenced;  // addresses of units that it stored since its last fence
  // asked for, to compare with those of its warpgroup's other threads
  uint32_t num_products = 0;
  bool is_fenced = false;  // wgmma.fence since its last commit
  void clear() {
    copies.clear();
    products.clear();
    unfenced.clear();
    num_products = 0;
    is_fenced = false;
  }
};

// Of the threads of a block together.
struct AsyncShared {
  bool is_late = false;
  // unit address -> thread that stored it and has not fenced
  std::map<uint32_t, uint32_t> writers;
  // warpgroup and number of a product -> its descriptors
  std::map<uint64_t, std::pair<uint64_t, uint64_t>> asked;
  void start() {
    is_late = !is_late;
    writers.clear();
    asked.clear();
  }
};

AsyncWork& own_async_work();
AsyncShared& block_async_work();

// cp.async of 16 bytes; commits; waits for all but the `most` newest groups.
void copy_unit_async(void* to, const void* from, Site site);
void commit_copies();
void wait_copies(uint32_t most);

// A store of 16 bytes that an asynchronous product is to read, and the fence that lets it.
void store_operand(void* to, const void* from, Site site);
void fence_operands();

// wgmma of 64 rows x num_outputs outputs x 16 inputs in bf16; operands by matrix descriptors,
// K-major, 128-byte swizzle.
void fence_products(Site site);
void multiply_async(float* sums, uint32_t num_outputs, uint64_t rows, uint64_t outputs, Site site);
void commit_products(Site site);
void wait_products(uint32_t most, Site site);

}  // namespace dflash::compute::gpu::sim
