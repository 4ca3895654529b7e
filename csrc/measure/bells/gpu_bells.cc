// Rings in each of the three ways. Waits of the queue that get no answer are ended by the host,
// which writes the answer's word itself.
// SPDX-License-Identifier: Apache-2.0
#include "measure/bells/gpu_bells.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "measure/bells/bell_kernels.h"

namespace dflash::measure {
namespace {

constexpr uint64_t kWordBytes = 256;  // holds one word; memory is allocated in such units
// Rounds that are queued at once. A driver takes about a thousand operations before it waits
// without a bound.
constexpr uint32_t kBatchRounds = 256;
// How long a kernel may exceed its budget, and how long what was released may take.
constexpr std::chrono::seconds kGrace{5};

}  // namespace

// What the queue calls, on a thread of the vendor's library.
struct GpuBells::Calls {
  std::vector<int64_t> times_ns;
  std::atomic<uint32_t> count{0};
  static void note(void* self) {
    auto* calls = static_cast<Calls*>(self);
    const uint32_t index = calls->count.load(std::memory_order_relaxed);
    if (index < calls->times_ns.size()) calls->times_ns[index] = now_ns();
    calls->count.store(index + 1, std::memory_order_release);
  }
};

GpuBells::GpuBells(compute::gpu::GpuHost& host, QueueWords& words) : host_(host), words_(words) {}

GpuBells::~GpuBells() {
  const Turn turn(host_);
  if (!turn.drain(kGrace).ok()) {
    calls_.release();  // leaked, because the device may still use it
    return;
  }
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

Error GpuBells::hung(const Turn& turn) {
  turn.count_as_hung();
  return Error{
      ErrorCode::kTimeout,
      "waits for an answer did not end in spite of their limit; the device counts as hung"};
}

Result<BellOutcome> GpuBells::ring(const BellPlan& plan, BellKind kind) {
  const Turn turn(host_);
  DFLASH_TRY(turn.drain(kGrace));
  DFLASH_TRY(reserve(turn));
  auto rung = kind == BellKind::kKernel   ? ring_by_kernel(plan, turn)
              : kind == BellKind::kStream ? ring_by_stream(plan, turn)
                                          : ring_by_calls(plan, turn);
  if (!rung.ok()) return host_.named(std::move(rung).error());
  return rung;
}

Result<BellOutcome> GpuBells::ring_by_kernel(const BellPlan& plan, const Turn& turn) {
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
  if (!is_done.value()) return hung(turn);
  BellOutcome outcome;
  std::memcpy(&outcome.num_done, mirror_, sizeof outcome.num_done);
  return outcome;
}

Result<BellOutcome> GpuBells::ring_by_stream(const BellPlan& plan, const Turn& turn) {
  const Deadline deadline = Deadline::after_ns(plan.budget.count());
  BellOutcome outcome;
  while (outcome.num_done < plan.num_rounds) {
    const uint32_t batch = std::min(kBatchRounds, plan.num_rounds - outcome.num_done);
    Status queued = ok();
    for (uint32_t i = 0; i < batch && queued.ok(); ++i) {
      const uint32_t value = plan.first + outcome.num_done + i;
      queued = words_.write(plan.ring, value);
      if (queued.ok()) queued = words_.await(plan.answer, value);
    }
    auto is_done = queued.ok() ? turn.runtime().wait(std::chrono::nanoseconds(deadline.left_ns()))
                               : Result<bool>(false);
    if (is_done.ok() && is_done.value()) {
      outcome.num_done += batch;
      continue;
    }
    std::atomic_ref<uint32_t>(*plan.release)
        .store(plan.first + plan.num_rounds, std::memory_order_release);
    is_done = turn.runtime().wait(kGrace);
    if (!queued.ok()) return std::move(queued).error();
    if (!is_done.ok()) return std::move(is_done).error();
    if (!is_done.value()) return hung(turn);
    break;
  }
  return outcome;
}

Result<BellOutcome> GpuBells::ring_by_calls(const BellPlan& plan, const Turn& turn) {
  const Deadline deadline = Deadline::after_ns(plan.budget.count());
  calls_ = std::make_unique<Calls>();
  calls_->times_ns.resize(plan.num_rounds);
  for (uint32_t queued = 0; queued < plan.num_rounds;) {
    const uint32_t batch = std::min(kBatchRounds, plan.num_rounds - queued);
    for (uint32_t i = 0; i < batch; ++i) {
      // A call follows some work of the device, as it would in use.
      DFLASH_TRY(turn.runtime().fill(memory_, 0, sizeof(uint32_t)));
      DFLASH_TRY(words_.call_host(&Calls::note, calls_.get()));
    }
    auto is_done = turn.runtime().wait(std::chrono::nanoseconds(deadline.left_ns()) + kGrace);
    if (!is_done.ok()) return std::move(is_done).error();
    if (!is_done.value()) return hung(turn);
    queued += batch;
  }
  BellOutcome outcome;
  outcome.num_done = std::min(calls_->count.load(std::memory_order_acquire), plan.num_rounds);
  outcome.calls_ns.assign(calls_->times_ns.begin(), calls_->times_ns.begin() + outcome.num_done);
  return outcome;
}

}  // namespace dflash::measure
