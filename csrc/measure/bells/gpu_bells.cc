// Rings by a kernel that gives up by itself after its budget.
// SPDX-License-Identifier: Apache-2.0
#include "measure/bells/gpu_bells.h"

#include <cstring>
#include <utility>

namespace dflash::measure {
namespace {

constexpr uint64_t kWordBytes = 256;  // holds one word; memory is allocated in such units
// How long a kernel may exceed its budget.
constexpr std::chrono::seconds kGrace{5};

}  // namespace

GpuBells::GpuBells(compute::gpu::GpuHost& host) : host_(host) {}

GpuBells::~GpuBells() {
  const Turn turn(host_);
  if (!turn.drain(kGrace).ok()) return;  // leaked, because the device may still use it
  turn.runtime().release(memory_);
  if (mirror_ != nullptr) turn.runtime().release_staging(mirror_);
}

Status GpuBells::reserve(const Turn& turn) {
  if (memory_ == nullptr) {
    auto memory = turn.runtime().allocate(kWordBytes);
    if (!memory.ok()) return host_.named(std::move(memory).error());
    memory_ = memory.value();
  }
  if (mirror_ == nullptr) {
    auto mirror = turn.runtime().allocate_staging(kWordBytes);
    if (!mirror.ok()) return host_.named(std::move(mirror).error());
    mirror_ = mirror.value();
  }
  return ok();
}

Result<uint32_t> GpuBells::ring(const BellPlan& plan) {
  const Turn turn(host_);
  DFLASH_TRY(turn.drain(kGrace));
  DFLASH_TRY(reserve(turn));
  auto rung = ring_by_kernel(plan, turn);
  if (!rung.ok()) return host_.named(std::move(rung).error());
  return rung;
}

Result<uint32_t> GpuBells::ring_by_kernel(const BellPlan& plan, const Turn& turn) {
  const BellParams params{plan.ring,
                          plan.answer,
                          reinterpret_cast<uint32_t*>(memory_),
                          static_cast<uint64_t>(plan.budget.count()),
                          plan.first,
                          plan.num_rounds};
  DFLASH_TRY(turn.runtime().fill(memory_, 0, sizeof(uint32_t)));
  DFLASH_TRY(turn.runtime().launch({.kernel = kRingBells,
                                    .threads = kBellThreads,
                                    .params = &params,
                                    .params_bytes = sizeof params}));
  DFLASH_TRY(turn.runtime().copy_out(mirror_, memory_, sizeof(uint32_t)));
  const auto is_done = turn.runtime().wait(plan.budget + kGrace);
  if (!is_done.ok()) return Error{is_done.error().code, is_done.error().message};
  if (!is_done.value()) {
    turn.count_as_hung();
    return Error{
        ErrorCode::kTimeout,
        "waits for an answer did not end in spite of their limit; the device counts as hung"};
  }
  uint32_t num_done = 0;
  std::memcpy(&num_done, mirror_, sizeof num_done);
  return num_done;
}

}  // namespace dflash::measure
