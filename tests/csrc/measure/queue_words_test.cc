// Stores, waits and calls of the host by a driver's streams: used where the driver has them,
// refused in its words where not.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <stdlib.h>

#include <memory>
#include <string>
#include <utility>

#if defined(DFLASH_CUDA_HEADERS)
#include <cuda.h>
#endif

#include "cards/cuda/cuda_driver.h"
#include "cards/module/module_runtime.h"
#include "measure/bells/bell_kernels.h"
#include "measure/bells/cuda_queue_functions.h"
#include "measure/bells/queue_words.h"
#include "plugin/alike_functions.h"

namespace {

using namespace dflash;
using namespace dflash::compute::gpu;

#if defined(DFLASH_CUDA_HEADERS)
DFLASH_CUDA_QUEUE_FUNCTIONS(DFLASH_SAME)
static_assert(CU_STREAM_WAIT_VALUE_GEQ == measure::cuda::kAwaitReached);
#endif

const char kImage[1] = {};

std::unique_ptr<DeviceRuntime> cuda_runtime() {
  auto driver = open_cuda_driver({kImage, 13, 75, true}, DFLASH_FAKE_CUDA);
  REQUIRE(driver.ok());
  auto runtime = make_module_runtime(std::move(driver).value(), 0, measure::kBellKernels);
  REQUIRE(runtime.ok());
  return std::move(runtime).value();
}

std::unique_ptr<measure::QueueWords> words_of(const DeviceRuntime& runtime) {
  auto words = measure::open_cuda_queue_words(runtime, DFLASH_FAKE_CUDA);
  REQUIRE(words.ok());
  return std::move(words).value();
}

}  // namespace

TEST_CASE("a stream stores a word, waits for one and calls the host") {
  const auto runtime = cuda_runtime();
  const auto words = words_of(*runtime);
  uint32_t word = 0;
  CHECK(words->write(&word, 41).ok());
  CHECK(word == 41);
  CHECK(words->await(&word, 41).ok());
  CHECK(words->call_host([](void* given) { ++*static_cast<uint32_t*>(given); }, &word).ok());
  CHECK(word == 42);
}

TEST_CASE("a driver without operations on words says so, and the device goes on") {
  const auto runtime = cuda_runtime();
  const auto words = words_of(*runtime);
  ::setenv("FAKE_CUDA", "wordless", 1);
  uint32_t word = 0;
  const Status refused = words->write(&word, 41);
  ::unsetenv("FAKE_CUDA");
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::kUnsupported);
  CHECK(refused.error().message == "stores of a stream failed: unknown error (CUDA error 801)");
  CHECK(runtime->free_bytes().ok());
}

TEST_CASE("a driver's library without these functions is refused by name") {
  const auto runtime = cuda_runtime();
  const auto found = measure::open_cuda_queue_words(*runtime, DFLASH_FAKE_HIP);
  REQUIRE_FALSE(found.ok());
  CHECK(found.error().code == ErrorCode::kUnsupported);
  CHECK(found.error().message.find("cuStreamWriteValue32_v2") != std::string::npos);
}

TEST_CASE("of AMD's driver none of them is used") {
  const auto words = measure::no_queue_words("hip");
  uint32_t word = 0;
  for (const Status& refused :
       {words->write(&word, 1), words->await(&word, 1), words->call_host([](void*) {}, nullptr)}) {
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::kUnsupported);
    CHECK(refused.error().message.find("hip is not used for ") == 0);
  }
}
