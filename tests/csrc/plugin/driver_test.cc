// The runtimes of real cards over drivers that are not there, too old, or misbehave: each fault ends in a typed error, none in a hang.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <stdlib.h>
#include <string.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "compute/gpu/cuda/cuda_driver.h"
#include "compute/gpu/hip/hip_driver.h"
#include "compute/gpu/module/module_runtime.h"

namespace {

using namespace dflash;
using namespace dflash::compute::gpu;

// An environment variable for as long as this lives.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Environment() { ::unsetenv(name_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
};

const char kImage[1] = {};

std::unique_ptr<DriverApi> fake_cuda() {
  auto driver = open_cuda_driver(kImage, 13, 75, DFLASH_FAKE_CUDA);
  REQUIRE(driver.ok());
  return std::move(driver).value();
}

std::unique_ptr<DeviceRuntime> fake_runtime() {
  auto runtime = make_module_runtime(fake_cuda(), 0);
  REQUIRE(runtime.ok());
  return std::move(runtime).value();
}

std::string refusal(Result<std::unique_ptr<DeviceRuntime>> runtime, ErrorCode code = ErrorCode::kUnsupported) {
  REQUIRE_FALSE(runtime.ok());
  CHECK(runtime.error().code == code);
  return runtime.error().message;
}

std::string node_of(uint64_t version) {
  return "cpu_cores_count 0\nsimd_count 240\nsimd_per_cu 4\nwave_front_size 64\ngfx_target_version " + std::to_string(version) + "\n";
}

// The kernel driver's topology with these nodes, in a folder of its own.
class Nodes {
 public:
  explicit Nodes(const std::vector<std::string>& properties) {
    std::string pattern = (std::filesystem::temp_directory_path() / "dflash-kfd-XXXXXX").string();
    REQUIRE(::mkdtemp(pattern.data()) != nullptr);
    root_ = pattern;
    for (size_t number = 0; number < properties.size(); ++number) {
      std::filesystem::create_directory(root_ / std::to_string(number));
      std::ofstream(root_ / std::to_string(number) / "properties") << properties[number];
    }
  }
  ~Nodes() { std::filesystem::remove_all(root_); }
  Nodes(const Nodes&) = delete;
  Nodes& operator=(const Nodes&) = delete;
  std::string path() const { return root_.string(); }

 private:
  std::filesystem::path root_;
};

}  // namespace

TEST_CASE("without a driver the reason names the libraries that were tried") {
  auto cuda = open_cuda_driver(kImage, 13, 75, "libcuda-that-is-not-there.so.1");
  REQUIRE_FALSE(cuda.ok());
  CHECK(cuda.error().code == ErrorCode::kUnsupported);
  CHECK(cuda.error().message.find("libcuda-that-is-not-there.so.1") != std::string::npos);
  auto hip = open_hip_driver({}, {"libhip-a.so.7", "libhip-b.so.6"});
  REQUIRE_FALSE(hip.ok());
  CHECK(hip.error().message.find("libhip-a.so.7, libhip-b.so.6") != std::string::npos);
}

TEST_CASE("a library that is no driver lacks functions, and the first is named") {
  auto driver = open_cuda_driver(kImage, 13, 75, "libm.so.6");
  REQUIRE_FALSE(driver.ok());
  CHECK(driver.error().message.find("libm.so.6 has no function cuInit") == 0);
}

TEST_CASE("devices are listed with architecture and memory, one below the build's with the reason") {
  auto devices = fake_cuda()->list();
  REQUIRE(devices.ok());
  REQUIRE(devices.value().size() == 2);
  CHECK(devices.value()[0].facts.architecture == "sm_90");
  CHECK(devices.value()[0].facts.name == "Fake card");
  CHECK(devices.value()[0].facts.num_units == 132);
  CHECK(devices.value()[0].reason.empty());
  CHECK(devices.value()[1].reason.find("sm_61 is below sm_75") != std::string::npos);
  CHECK(refusal(make_module_runtime(fake_cuda(), 1)).find("sm_61") != std::string::npos);
  CHECK(refusal(make_module_runtime(fake_cuda(), 2), ErrorCode::kInvalidArgument) == "device 2 does not exist; the driver lists 2");
}

TEST_CASE("no device, a driver older than the build, and one that does not start are told apart") {
  {
    const Environment fault("FAKE_CUDA", "none");
    auto devices = fake_cuda()->list();
    REQUIRE(devices.ok());
    CHECK(devices.value().empty());
  }
  {
    const Environment fault("FAKE_CUDA", "old");
    auto devices = fake_cuda()->list();
    REQUIRE_FALSE(devices.ok());
    CHECK(devices.error().message == "the driver is for CUDA 12.4, this build needs 13.0 or later; update the driver");
  }
  {
    const Environment fault("FAKE_CUDA", "silent");
    auto devices = fake_cuda()->list();
    REQUIRE_FALSE(devices.ok());
    CHECK(devices.error().message == "the driver does not start: unknown error (CUDA error 999)");
  }
  const Environment fault("FAKE_CUDA", "foreign");
  CHECK(refusal(make_module_runtime(fake_cuda(), 0)) == "no kernels of this build run on sm_90: no kernel image is available (CUDA error 209)");
}

TEST_CASE("memory goes to the device and back, and a wait ends once the queue is empty") {
  auto runtime = fake_runtime();
  auto device = runtime->allocate(64);
  REQUIRE(device.ok());
  auto staging = runtime->allocate_staging(64);
  REQUIRE(staging.ok());
  ::memset(staging.value(), 7, 64);
  REQUIRE(runtime->fill(device.value(), 9, 64).ok());
  REQUIRE(runtime->copy_in(device.value(), staging.value(), 32).ok());
  std::byte back[64] = {};
  REQUIRE(runtime->copy_out(back, device.value(), 64).ok());
  auto ended = runtime->wait(std::chrono::seconds(5));
  REQUIRE(ended.ok());
  CHECK(ended.value());
  CHECK(back[31] == std::byte{7});
  CHECK(back[32] == std::byte{9});
  runtime->release(device.value());
  runtime->release_staging(staging.value());
}

TEST_CASE("a full device is kOutOfMemory with what is free, and the runtime lives on") {
  auto runtime = fake_runtime();
  const Environment fault("FAKE_CUDA", "full");
  auto memory = runtime->allocate(1 << 30);
  REQUIRE_FALSE(memory.ok());
  CHECK(memory.error().code == ErrorCode::kOutOfMemory);
  CHECK(memory.error().message.find("1073741824 bytes of memory on the device could not be allocated; 4096 of 1048576") == 0);
  CHECK(runtime->free_bytes().ok());
}

TEST_CASE("a card that is lost fails the wait and everything after it with the driver's words") {
  const Environment fault("FAKE_CUDA", "lost");
  auto runtime = fake_runtime();
  auto ended = runtime->wait(std::chrono::seconds(5));
  REQUIRE_FALSE(ended.ok());
  CHECK(ended.error().code == ErrorCode::kWorkerFailed);
  CHECK(ended.error().message == "a kernel or copy failed: an illegal memory access was encountered (CUDA error 700)");
  auto later = runtime->allocate(64);
  REQUIRE_FALSE(later.ok());
  CHECK(later.error().message == ended.error().message);
}

TEST_CASE("work that never ends costs the caller its limit, and the destructor a second") {
  const Environment fault("FAKE_CUDA", "hung");
  auto runtime = fake_runtime();
  auto ended = runtime->wait(std::chrono::milliseconds(20));
  REQUIRE(ended.ok());
  CHECK_FALSE(ended.value());
  const int64_t before = now_ns();
  runtime.reset();
  CHECK(now_ns() - before < 10'000'000'000);
}

TEST_CASE("HIP takes the code object of the device's architecture, or the one that loads where that is not known") {
  const char fits[] = {6, 0}, differs[] = {5, 0};
  const std::vector<CodeObject> objects = {{"gfx1030", differs}, {"gfx906", fits}};
  const Nodes radeon({"cpu_cores_count 8\ngfx_target_version 0\n", node_of(90006)});
  for (const std::string& topology : {radeon.path(), std::string("/nonexistent")}) {
    auto driver = open_hip_driver(objects, {"libhip-that-is-not-there.so.7", DFLASH_FAKE_HIP}, topology);
    REQUIRE(driver.ok());
    auto devices = driver.value()->list();
    REQUIRE(devices.ok());
    REQUIRE(devices.value().size() == 1);
    CHECK(devices.value()[0].facts.architecture == (topology == "/nonexistent" ? "" : "gfx906"));
    CHECK(make_module_runtime(std::move(driver).value(), 0).ok());
  }
  const Nodes unknown({node_of(110501)});
  auto driver = open_hip_driver(objects, {DFLASH_FAKE_HIP}, unknown.path());
  REQUIRE(driver.ok());
  CHECK(refusal(make_module_runtime(std::move(driver).value(), 0)) ==
        "its architecture gfx1151 is none of those that this build has kernels for: gfx1030, gfx906");
}

TEST_CASE("HIP without a device is an empty list, whatever the runtime calls it") {
  const Environment fault("FAKE_HIP", "none");
  auto driver = open_hip_driver({}, {DFLASH_FAKE_HIP});
  REQUIRE(driver.ok());
  auto devices = driver.value()->list();
  REQUIRE(devices.ok());
  CHECK(devices.value().empty());
}

TEST_CASE("the kernel driver's nodes give names, units and waves; processors are skipped") {
  const Nodes nodes({"gfx_target_version 0\n", node_of(90010), "simd_count 64\nsimd_per_cu 2\nwave_front_size 32\ngfx_target_version 110000\n"});
  const std::vector<HipNode> found = read_hip_nodes(nodes.path());
  REQUIRE(found.size() == 2);
  CHECK(found[0].architecture == "gfx90a");
  CHECK(found[0].num_units == 60);
  CHECK(found[0].wave_width == 64);
  CHECK(found[1].architecture == "gfx1100");
  CHECK(found[1].num_units == 32);
  CHECK(found[1].wave_width == 32);
  CHECK(architecture_name(90402) == "gfx942");
  CHECK(architecture_name(120001) == "gfx1201");
  CHECK(read_hip_nodes("/nonexistent").empty());
}

TEST_CASE("a thread finds current what was so before it used the device") {
  auto driver = fake_cuda();
  DriverApi& api = *driver;
  auto made = make_module_runtime(std::move(driver), 0);
  REQUIRE(made.ok());
  std::thread other([&] {
    int theirs = 0;
    REQUIRE(api.restore(&theirs) == 0);  // as a framework that uses another device does
    REQUIRE(made.value()->free_bytes().ok());
    void* current = nullptr;
    REQUIRE(api.current(&current) == 0);
    CHECK(current != &theirs);
    made.value()->leave();
    REQUIRE(api.current(&current) == 0);
    CHECK(current == &theirs);
  });
  other.join();
}
