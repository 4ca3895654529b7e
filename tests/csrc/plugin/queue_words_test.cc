// Stores, waits and calls of the host by a driver's streams: used where the driver has them,
// refused in its words where not.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <stdlib.h>

#include <string>
#include <utility>

#include "compute/gpu/cuda/cuda_driver.h"
#include "compute/gpu/hip/hip_driver.h"
#include "compute/gpu/module/module_runtime.h"

namespace {

using namespace dflash;
using namespace dflash::compute::gpu;

const char kImage[1] = {};

std::unique_ptr<DeviceRuntime> cuda_runtime() {
  auto driver = open_cuda_driver({kImage, 13, 75, true}, DFLASH_FAKE_CUDA);
  REQUIRE(driver.ok());
  auto runtime = make_module_runtime(std::move(driver).value(), 0);
  REQUIRE(runtime.ok());
  return std::move(runtime).value();
}

}  // namespace

TEST_CASE("a stream stores a word, waits for one and calls the host") {
  auto runtime = cuda_runtime();
  uint32_t word = 0;
  CHECK(runtime->write_word(&word, 41).ok());
  CHECK(word == 41);
  CHECK(runtime->await_word(&word, 41).ok());
  CHECK(runtime->call_host([](void* given) { ++*static_cast<uint32_t*>(given); }, &word).ok());
  CHECK(word == 42);
}

TEST_CASE("a driver without operations on words says so, and the device goes on") {
  auto runtime = cuda_runtime();
  ::setenv("FAKE_CUDA", "wordless", 1);
  uint32_t word = 0;
  const Status refused = runtime->write_word(&word, 41);
  ::unsetenv("FAKE_CUDA");
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::kUnsupported);
  CHECK(refused.error().message == "stores of a stream failed: unknown error (CUDA error 801)");
  CHECK(runtime->free_bytes().ok());
}

TEST_CASE("of AMD's driver none of them is used") {
  const char fits[] = {6, 0};
  auto driver = open_hip_driver(
      {
          {"gfx906", fits}
  },
      {DFLASH_FAKE_HIP}, "/nonexistent");
  REQUIRE(driver.ok());
  auto runtime = make_module_runtime(std::move(driver).value(), 0);
  REQUIRE(runtime.ok());
  uint32_t word = 0;
  for (const Status& refused :
       {runtime.value()->write_word(&word, 1), runtime.value()->await_word(&word, 1),
        runtime.value()->call_host([](void*) {}, nullptr)}) {
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::kUnsupported);
    CHECK(refused.error().message.find("hip is not used for ") == 0);
  }
  CHECK(runtime.value()->free_bytes().ok());
}
