// The simulated device behind the DeviceRuntime contract: order, memory, errors that stick; and the
// row conversion against base/dtype.h.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "cards/kernel_params.h"
#include "cards/kernel_table.h"
#include "cards/sim/sim_runtime.h"
#include "failed.h"

namespace dflash::compute::gpu {
namespace {

constexpr std::chrono::seconds kLong{30};

std::unique_ptr<DeviceRuntime> device(SimulatedVendor vendor = SimulatedVendor::kCuda,
                                      uint64_t memory = 1 << 20, uint64_t seed = 1) {
  return make_simulated_runtime({vendor, memory, seed}).value();
}

KernelLaunch widen_launch(const WidenParams& params, uint32_t grid) {
  return {.kernel = kernel_id(PlainKernel::k_widen_rows),
          .grid_x = grid,
          .threads = 256,
          .params = &params,
          .params_bytes = sizeof(params)};
}

TEST_CASE("rows of every dtype widen to the bits of base/dtype.h, special values included") {
  std::mt19937 random(5);
  for (Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
    const uint32_t count = dtype == Dtype::kF32 ? 5000 : 65536;
    std::vector<std::byte> source(count * dtype_bytes(dtype));
    for (uint32_t i = 0; i < count; ++i) {
      // every 16-bit pattern
      const uint32_t bits = dtype == Dtype::kF32 ? static_cast<uint32_t>(random()) : i;
      std::memcpy(source.data() + i * dtype_bytes(dtype), &bits, dtype_bytes(dtype));
    }
    std::vector<float> expected(count), found(count);
    widen(dtype, source.data(), expected.data(), count);
    for (SimulatedVendor vendor : {SimulatedVendor::kCuda, SimulatedVendor::kHip}) {
      const auto runtime = device(vendor);
      std::byte* in = runtime->allocate(source.size()).value();
      std::byte* out = runtime->allocate(count * 4).value();
      REQUIRE(runtime->copy_in(in, source.data(), source.size()).ok());
      const WidenParams params{in, reinterpret_cast<float*>(out), 1, count, count, dtype};
      REQUIRE(runtime->launch(widen_launch(params, (count + 255) / 256)).ok());
      REQUIRE(runtime->copy_out(reinterpret_cast<std::byte*>(found.data()), out, count * 4).ok());
      REQUIRE(runtime->wait(kLong).value());
      CHECK(std::memcmp(found.data(), expected.data(), count * 4) == 0);
    }
  }
}

TEST_CASE("nothing happens before the wait, and a short wait says that work is left") {
  const auto runtime = device();
  std::byte* memory = runtime->allocate(300000).value();
  std::vector<std::byte> host(300000, std::byte{1});
  REQUIRE(runtime->fill(memory, 0, 300000).ok());
  const WidenParams params{memory, reinterpret_cast<float*>(memory), 200, 256, 256, Dtype::kF32};
  REQUIRE(runtime->launch(widen_launch(params, 200)).ok());
  REQUIRE(runtime->copy_out(host.data(), memory, 300000).ok());
  CHECK(host[0] == std::byte{1});
  CHECK_FALSE(runtime->wait(std::chrono::nanoseconds(1)).value());
  CHECK(runtime->wait(kLong).value());
  CHECK(host[299999] == std::byte{0});
  CHECK(runtime->wait(std::chrono::nanoseconds(0)).value());
}

TEST_CASE(
    "memory beyond the device's is refused with the bytes asked for and free, and comes back when "
    "released") {
  const auto runtime = device(SimulatedVendor::kCuda, 1000);
  std::byte* memory = runtime->allocate(600).value();
  CHECK(runtime->allocate(500) == Failed(ErrorCode::kOutOfMemory, "500 bytes; 400 are free"));
  runtime->release(memory);
  CHECK(runtime->free_bytes().value() == 1000);
  CHECK(runtime->allocate(1000).ok());
}

TEST_CASE("an error of the device is reported by every later call") {
  const auto runtime = device();
  std::byte* memory = runtime->allocate(64).value();
  std::byte host[128];
  CHECK_FALSE(runtime->copy_in(memory, host, 65).ok());
  CHECK(runtime->copy_in(memory, host, 64).error().message == Has{"copy_in of 65 bytes"});
  CHECK(runtime->wait(kLong).error().code == ErrorCode::kWorkerFailed);
}

TEST_CASE("a launch with the wrong parameters is refused") {
  const WidenParams params{};
  for (int wrong = 0; wrong < 4; ++wrong) {
    KernelLaunch launch = widen_launch(params, 1);
    if (wrong == 0) launch.threads = 65;
    if (wrong == 1) launch.params_bytes -= 8;
    if (wrong == 2) launch.kernel = static_cast<KernelId>(kNumKernels);
    if (wrong == 3) launch.grid_y = 65536;
    CHECK_FALSE(device()->launch(launch).ok());
  }
}

TEST_CASE("kernels have the names that modules export") {
  CHECK(std::string(entry_of(expert_kernels(), kernel_id(PlainKernel::k_combine)).name) ==
        "dflash_combine");
  CHECK(std::string(
            entry_of(expert_kernels(), kernel_id(WeightKernel::k_project_few, WeightFormat::kF32))
                .name) == "dflash_project_few_f32");
  for (WeightFormat weight_format : kCardFormats) {
    CHECK(entry_of(expert_kernels(), kernel_id(WeightKernel::k_project_many, weight_format)).name ==
          std::string("dflash_project_many_") + format_name(weight_format));
  }
}

}  // namespace
}  // namespace dflash::compute::gpu
