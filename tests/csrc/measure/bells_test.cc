// Ping-pongs of a simulated device with the processor: every round is answered, and a ping-pong
// whose answers never come ends by itself.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <future>
#include <utility>

#include "base/clock.h"
#include "measure/bell_device.h"
#include "measure/bells/gpu_bells.h"
#include "measure/bells/sim_bells.h"

namespace {

using namespace dflash;
using namespace dflash::measure;
using compute::gpu::make_simulated_runtime;

constexpr int64_t kPatientNs = 30'000'000'000;

struct Scene {
  Scene() : Scene(make_simulated_runtime({.memory_bytes = 1 << 20}, bell_module()).value()) {}
  explicit Scene(std::unique_ptr<compute::gpu::DeviceRuntime> runtime)
      : host(std::move(runtime)), bells(host) {}
  BellPlan plan(uint32_t first, uint32_t rounds,
                std::chrono::nanoseconds budget = std::chrono::nanoseconds(kPatientNs)) {
    return {&ring, &answer, first, rounds, budget};
  }
  std::future<std::vector<int64_t>> echo(uint32_t first, uint32_t rounds) {
    return std::async(std::launch::async, [this, first, rounds] {
      return answer_bells({&ring, &answer, first, rounds, kPatientNs});
    });
  }
  alignas(64) uint32_t ring = 0;
  alignas(64) uint32_t answer = 0;
  compute::gpu::GpuHost host;
  GpuBells bells;
};

}  // namespace

TEST_CASE("a kernel is answered in every round, also across the end of the numbers") {
  Scene scene;
  uint32_t first = ~uint32_t{0} - 150;
  for (int i = 0; i < 2; ++i) {
    auto seen = scene.echo(first, 300);
    auto num_done = scene.bells.ring(scene.plan(first, 300));
    REQUIRE(num_done.ok());
    CHECK(num_done.value() == 300);
    const std::vector<int64_t> times = seen.get();
    CHECK(times.size() == 300);
    CHECK(std::is_sorted(times.begin(), times.end()));
    first += 301;
  }
}

TEST_CASE("without an answer a kernel ends at its budget, and the device goes on") {
  Scene scene;
  const int64_t began = now_ns();
  auto num_done = scene.bells.ring(scene.plan(1, 300, std::chrono::milliseconds(100)));
  REQUIRE(num_done.ok());
  CHECK(num_done.value() == 0);
  CHECK(now_ns() - began >= 100'000'000);
  CHECK(now_ns() - began < 20'000'000'000);  // 300 rounds of their own budget would take longer
  auto seen = scene.echo(302, 3);
  CHECK(scene.bells.ring(scene.plan(302, 3)).value() == 3);
  CHECK(seen.get().size() == 3);
}

TEST_CASE("an echo that nobody rings gives up in time with what it saw") {
  uint32_t ring = 7, answer = 0;
  CHECK(answer_bells({&ring, &answer, 7, 2, 20'000'000}).size() == 1);
  CHECK(answer == 7);
}
