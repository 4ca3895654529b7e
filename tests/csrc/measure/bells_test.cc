// Ping-pongs of a simulated device with the processor: every way is answered, and one whose answers
// never come ends by itself.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <future>
#include <utility>

#include "base/clock.h"
#include "measure/bell_echo.h"
#include "measure/bells/gpu_bells.h"
#include "measure/bells/sim_bells.h"

namespace {

using namespace dflash;
using namespace dflash::measure;
using compute::gpu::make_simulated_runtime;
using compute::gpu::SimulatedRuntime;

constexpr int64_t kPatientNs = 30'000'000'000;

struct Scene {
  Scene() : Scene(make_simulated_runtime({.memory_bytes = 1 << 20}, bell_module()).value()) {}
  explicit Scene(std::unique_ptr<SimulatedRuntime> runtime)
      : words(simulated_queue_words(*runtime)), host(std::move(runtime)), bells(host, *words) {}
  BellPlan plan(uint32_t first, uint32_t rounds,
                std::chrono::nanoseconds budget = std::chrono::nanoseconds(kPatientNs)) {
    return {&ring, &answer, &answer, first, rounds, budget};
  }
  std::future<std::vector<int64_t>> echo(uint32_t first, uint32_t rounds) {
    return std::async(std::launch::async, [this, first, rounds] {
      return answer_bells({&ring, &answer, first, rounds, kPatientNs});
    });
  }
  alignas(64) uint32_t ring = 0;
  alignas(64) uint32_t answer = 0;
  std::unique_ptr<QueueWords> words;
  compute::gpu::GpuHost host;
  GpuBells bells;
};

}  // namespace

TEST_CASE(
    "kernels and streams are answered in every round, also beyond a batch and across the end of "
    "the numbers") {
  Scene scene;
  uint32_t first = ~uint32_t{0} - 150;
  for (const BellKind kind : {BellKind::kKernel, BellKind::kStream, BellKind::kKernel}) {
    CAPTURE(static_cast<int>(kind));
    auto seen = scene.echo(first, 300);
    auto outcome = scene.bells.ring(scene.plan(first, 300), kind);
    REQUIRE(outcome.ok());
    CHECK(outcome.value().num_done == 300);
    CHECK(outcome.value().calls_ns.empty());
    const std::vector<int64_t> times = seen.get();
    CHECK(times.size() == 300);
    CHECK(std::is_sorted(times.begin(), times.end()));
    first += 301;
  }
}

TEST_CASE("a stream calls the host once a round, and says when") {
  Scene scene;
  auto outcome = scene.bells.ring(scene.plan(1, 300), BellKind::kCall);
  REQUIRE(outcome.ok());
  CHECK(outcome.value().num_done == 300);
  CHECK(outcome.value().calls_ns.size() == 300);
  CHECK(std::is_sorted(outcome.value().calls_ns.begin(), outcome.value().calls_ns.end()));
  CHECK(outcome.value().calls_ns.front() > 0);
}

TEST_CASE("without an answer both ways end at their budget, and the device goes on") {
  Scene scene;
  uint32_t first = 1;
  for (const BellKind kind : {BellKind::kKernel, BellKind::kStream}) {
    CAPTURE(static_cast<int>(kind));
    const int64_t began = now_ns();
    auto outcome = scene.bells.ring(scene.plan(first, 300, std::chrono::milliseconds(100)), kind);
    REQUIRE(outcome.ok());
    CHECK(outcome.value().num_done == 0);
    CHECK(now_ns() - began >= 100'000'000);
    CHECK(now_ns() - began < 20'000'000'000);  // 300 rounds of their own budget would take longer
    first += 301;
  }
  auto seen = scene.echo(first, 3);
  CHECK(scene.bells.ring(scene.plan(first, 3), BellKind::kKernel).value().num_done == 3);
  CHECK(seen.get().size() == 3);
}

TEST_CASE("an echo that nobody rings gives up in time with what it saw") {
  uint32_t ring = 7, answer = 0;
  CHECK(answer_bells({&ring, &answer, 7, 2, 20'000'000}).size() == 1);
  CHECK(answer == 7);
}
