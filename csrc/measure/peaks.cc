// Runs the loops of peaks.h on a pool of threads, which start together because they spin.
// SPDX-License-Identifier: Apache-2.0
#include "measure/peaks.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/clock.h"
#include "compute/cpu/page_buffer.h"
#include "compute/cpu/thread_pool.h"
#include "compute/vector_scalar.h"
#include "measure/peak_loops.h"
#if defined(__aarch64__)
#include "compute/cpu/kernels/vector_neon.h"
#endif

namespace dflash::measure {

// The sets that need no flags of the compiler; every other set has a file of its own.
constinit const PeakLoops kScalarPeaks = make_peak_loops<compute::ScalarVector>();
#if defined(__aarch64__)
constinit const PeakLoops kNeonPeaks = make_peak_loops<compute::NeonVector>();
#endif

namespace {

constexpr int64_t kSpinNs = 1'000'000;  // lets the threads of a measurement start together
constexpr size_t kReadStep = 512;       // bytes, a multiple of every set's step

Result<std::unique_ptr<compute::ThreadPool>> make_pool(uint32_t num_threads) {
  return compute::ThreadPool::create(num_threads, {}, kSpinNs);
}

Status check_rounds(uint32_t num_threads, uint32_t rounds) {
  if (num_threads >= 1 && num_threads <= 1024 && rounds >= 1 && rounds <= 10'000) return ok();
  return Error{ErrorCode::kInvalidArgument,
               "a peak is measured with 1..1024 threads and 1..10000 rounds"};
}

// Runs a loop of the form of PeakLoops::multiply_add. Returns the operations per second of all
// threads together, once per round.
using OperationLoop = uint64_t (*)(uint64_t rounds, float* sink);
Result<std::vector<double>> operations_per_s(OperationLoop loop, uint32_t num_threads,
                                             uint32_t rounds, double milliseconds) {
  DFLASH_TRY(check_rounds(num_threads, rounds));
  auto pool = make_pool(num_threads);
  if (!pool.ok()) return std::move(pool).error();
  std::vector<float> sinks(size_t{num_threads} * 16);
  constexpr uint64_t kTrial = 2'000;
  const int64_t began = now_ns();
  loop(kTrial, sinks.data());
  const double trial_ns = static_cast<double>(std::max<int64_t>(now_ns() - began, 1));
  const auto passes =
      static_cast<uint64_t>(std::clamp(kTrial * milliseconds * 1e6 / trial_ns, 1.0, 1e9));
  std::vector<double> found;
  for (uint32_t round = 0; round < rounds; ++round) {
    std::vector<uint64_t> operations(num_threads);
    const int64_t start = now_ns();
    pool.value()->run(num_threads,
                      [&](uint64_t task) { operations[task] = loop(passes, &sinks[task * 16]); });
    const double seconds = static_cast<double>(now_ns() - start) * 1e-9;
    double total = 0;
    for (const uint64_t count : operations) total += static_cast<double>(count);
    found.push_back(total / seconds);
  }
  return found;
}

// Returns null where the set has no instruction for bf16 factors.
OperationLoop bf16_loop(compute::Isa isa) {
#if defined(__x86_64__)
  if (isa == compute::Isa::kAvx512Bf16) return bf16_multiply_add_avx512bf16;
#elif defined(__aarch64__)
  if (isa == compute::Isa::kNeonBf16) return bf16_multiply_add_neon_bf16;
#endif
  static_cast<void>(isa);
  return nullptr;
}

// Returns null where the set has no integer loop.
OperationLoop integer_loop(compute::Isa isa) {
#if defined(__x86_64__)
  if (isa == compute::Isa::kAvx2) return integer_multiply_add_avx2;
  if (isa == compute::Isa::kAvx512) return integer_multiply_add_avx512;
  if (isa == compute::Isa::kAvx512Vnni || isa == compute::Isa::kAvx512Bf16)
    return integer_multiply_add_avx512vnni;
#elif defined(__aarch64__)
  if (isa == compute::Isa::kNeonDotprod) return integer_multiply_add_neon_dotprod;
  if (isa == compute::Isa::kNeonI8mm || isa == compute::Isa::kNeonBf16)
    return integer_multiply_add_neon_i8mm;
#endif
  static_cast<void>(isa);
  return nullptr;
}

}  // namespace

const PeakLoops& peak_loops(compute::Isa isa) {
#if defined(__x86_64__)
  if (isa == compute::Isa::kAvx512 || isa == compute::Isa::kAvx512Vnni ||
      isa == compute::Isa::kAvx512Bf16)
    return kAvx512Peaks;
  if (isa == compute::Isa::kAvx2) return kAvx2Peaks;
#elif defined(__aarch64__)
  if (isa == compute::Isa::kNeon || isa == compute::Isa::kNeonDotprod ||
      isa == compute::Isa::kNeonI8mm || isa == compute::Isa::kNeonBf16)
    return kNeonPeaks;
#endif
  static_cast<void>(isa);
  return kScalarPeaks;
}

Result<std::vector<double>> multiply_add_per_s(compute::Isa isa, uint32_t num_threads,
                                               uint32_t rounds, double milliseconds) {
  return operations_per_s(peak_loops(isa).multiply_add, num_threads, rounds, milliseconds);
}

Result<std::vector<double>> bf16_multiply_add_per_s(compute::Isa isa, uint32_t num_threads,
                                                    uint32_t rounds, double milliseconds) {
  if (const OperationLoop loop = bf16_loop(isa))
    return operations_per_s(loop, num_threads, rounds, milliseconds);
  return Error{ErrorCode::kUnsupported, std::string("CPU kernel set '") + compute::isa_name(isa) +
                                            "' has no bf16 multiply-add to measure"};
}

Result<std::vector<double>> integer_multiply_add_per_s(compute::Isa isa, uint32_t num_threads,
                                                       uint32_t rounds, double milliseconds) {
  if (const OperationLoop loop = integer_loop(isa))
    return operations_per_s(loop, num_threads, rounds, milliseconds);
  return Error{ErrorCode::kUnsupported, std::string("CPU kernel set '") + compute::isa_name(isa) +
                                            "' has no integer multiply-add to measure"};
}

Result<std::vector<double>> read_bytes_per_s(compute::Isa isa, uint32_t num_threads,
                                             uint32_t rounds, size_t num_bytes) {
  DFLASH_TRY(check_rounds(num_threads, rounds));
  num_bytes = num_bytes / kReadStep * kReadStep;
  if (num_bytes == 0)
    return Error{ErrorCode::kInvalidArgument, "a read is measured over at least 512 bytes"};
  auto pool = make_pool(num_threads);
  if (!pool.ok()) return std::move(pool).error();
  auto memory = compute::PageBuffer::create(num_bytes * num_threads);
  if (!memory.ok()) return std::move(memory).error();
  std::vector<float> sinks(size_t{num_threads} * 16);
  // Each thread touches what it will read, so that on machines with several nodes its memory is
  // near.
  pool.value()->run(num_threads, [&](uint64_t task) {
    std::memset(memory.value().data() + task * num_bytes, 0, num_bytes);
  });
  std::vector<double> found;
  for (uint32_t round = 0; round < rounds; ++round) {
    const int64_t start = now_ns();
    pool.value()->run(num_threads, [&](uint64_t task) {
      peak_loops(isa).read(memory.value().data() + task * num_bytes, num_bytes, &sinks[task * 16]);
    });
    found.push_back(static_cast<double>(num_bytes * num_threads) /
                    (static_cast<double>(now_ns() - start) * 1e-9));
  }
  return found;
}

}  // namespace dflash::measure
