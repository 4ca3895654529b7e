// The runtimes of real cards over drivers that are not there, too old, or misbehave: each fault
// ends in a typed error, none in a hang.
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
#include "cards/cuda/cuda_driver.h"
#include "cards/hip/hip_driver.h"
#include "cards/kernel_params.h"
#include "cards/kernel_table.h"
#include "cards/module/module_runtime.h"
#include "failed.h"

namespace {

using namespace dflash;
using namespace dflash::compute::gpu;
using dflash::compute::WeightFormat;

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
  auto driver = open_cuda_driver({kImage, 13, 75, true}, DFLASH_FAKE_CUDA);
  REQUIRE(driver.ok());
  return std::move(driver).value();
}

std::unique_ptr<DeviceRuntime> fake_runtime() {
  auto runtime = make_module_runtime(fake_cuda(), 0);
  REQUIRE(runtime.ok());
  return std::move(runtime).value();
}

std::string refusal(Result<std::unique_ptr<DeviceRuntime>> runtime,
                    ErrorCode code = ErrorCode::kUnsupported) {
  REQUIRE_FALSE(runtime.ok());
  CHECK(runtime.error().code == code);
  return runtime.error().message;
}

std::string node_of(uint64_t version) {
  return "cpu_cores_count 0\nsimd_count 240\nsimd_per_cu 4\nwave_front_size "
         "64\ngfx_target_version " +
         std::to_string(version) + "\n";
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
  CHECK(open_cuda_driver({kImage, 13, 75, true}, "libcuda-that-is-not-there.so.1") ==
        Failed(ErrorCode::kUnsupported, "libcuda-that-is-not-there.so.1"));
  auto hip = open_hip_driver({}, {"libhip-a.so.7", "libhip-b.so.6"});
  REQUIRE_FALSE(hip.ok());
  CHECK(hip.error().message == Has{"libhip-a.so.7, libhip-b.so.6"});
}

TEST_CASE("a library that is no driver lacks functions, and the first is named") {
  auto driver = open_cuda_driver({kImage, 13, 75, true}, "libm.so.6");
  REQUIRE_FALSE(driver.ok());
  CHECK(driver.error().message.find("libm.so.6 has no function cuInit") == 0);
}

TEST_CASE(
    "devices are listed with architecture and memory, one below the build's with the reason") {
  auto devices = fake_cuda()->list();
  REQUIRE(devices.ok());
  REQUIRE(devices.value().size() == 2);
  CHECK(devices.value()[0].facts.architecture == "sm_90");
  CHECK(devices.value()[0].facts.name == "Fake card");
  CHECK(devices.value()[0].facts.num_units == 132);
  CHECK(devices.value()[0].reason.empty());
  CHECK(devices.value()[1].reason == Has{"sm_61 is below sm_75"});
  CHECK(refusal(make_module_runtime(fake_cuda(), 1)) == Has{"sm_61"});
  CHECK(refusal(make_module_runtime(fake_cuda(), 2), ErrorCode::kInvalidArgument) ==
        "device 2 does not exist; the driver lists 2");
}

TEST_CASE(
    "only cards of compute capability 9.0 multiply by warpgroups, and only with an image of "
    "sm_90a") {
  const auto has_warpgroups = [](bool has_sm90a, uint32_t index) {
    auto driver = open_cuda_driver({kImage, 13, 60, has_sm90a}, DFLASH_FAKE_CUDA);
    REQUIRE(driver.ok());
    return driver.value()->list().value()[index].facts.has_warpgroups;
  };
  CHECK(has_warpgroups(true, 0));
  CHECK_FALSE(has_warpgroups(false, 0));
  CHECK_FALSE(has_warpgroups(true, 1));  // sm_61
}

TEST_CASE("a kernel that needs more shared memory than 48 KiB is allowed it before its launch") {
  const auto runtime = fake_runtime();
  const ProjectionParams params{};
  const KernelLaunch launch{.kernel = kernel_id(WeightKernel::k_bf16_wgmma, WeightFormat::kBF16),
                            .threads = 256,
                            .params = &params,
                            .params_bytes = sizeof(params)};
  REQUIRE(entry_of(expert_kernels(), launch.kernel).dynamic_bytes > 48 * 1024);
  CHECK(runtime->launch(launch).ok());
  CHECK(entry_of(expert_kernels(), kernel_id(WeightKernel::k_bf16_many, WeightFormat::kIq4Xs))
            .dynamic_bytes == 0);
  CHECK(entry_of(expert_kernels(), kernel_id(WeightKernel::k_bf16_wgmma, WeightFormat::kIq4Xs))
            .dynamic_bytes == kWgmmaSharedBytes);
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
    CHECK(devices.error().message ==
          "the driver is for CUDA 12.4, this build needs 13.0 or later; update the driver");
  }
  {
    const Environment fault("FAKE_CUDA", "silent");
    auto devices = fake_cuda()->list();
    REQUIRE_FALSE(devices.ok());
    CHECK(devices.error().message == "the driver does not start: unknown error (CUDA error 999)");
  }
  const Environment fault("FAKE_CUDA", "foreign");
  CHECK(refusal(make_module_runtime(fake_cuda(), 0)) ==
        "no kernels of this build run on sm_90: no kernel image is available (CUDA error 209)");
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
  REQUIRE(memory == Failed(ErrorCode::kOutOfMemory));
  CHECK(memory.error().message.find(
            "1073741824 bytes of memory on the device could not be allocated; 4096 of 1048576") ==
        0);
  CHECK(runtime->free_bytes().ok());
}

TEST_CASE("a card that is lost fails the wait and everything after it with the driver's words") {
  const Environment fault("FAKE_CUDA", "lost");
  auto runtime = fake_runtime();
  auto ended = runtime->wait(std::chrono::seconds(5));
  REQUIRE(ended == Failed(ErrorCode::kWorkerFailed));
  CHECK(ended.error().message ==
        "a kernel or copy failed: an illegal memory access was encountered (CUDA error 700)");
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

TEST_CASE(
    "HIP takes the code object of the device's architecture, or the one that loads where that is "
    "not known") {
  const char fits[] = {6, 0}, differs[] = {5, 0};
  const std::vector<CodeObject> objects = {
      {"gfx1030", differs},
      {"gfx906",  fits   }
  };
  const Nodes radeon({"cpu_cores_count 8\ngfx_target_version 0\n", node_of(90006)});
  for (const std::string& topology : {radeon.path(), std::string("/nonexistent")}) {
    auto driver =
        open_hip_driver(objects, {"libhip-that-is-not-there.so.7", DFLASH_FAKE_HIP}, topology);
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
  CHECK(
      refusal(make_module_runtime(std::move(driver).value(), 0)) ==
      "its architecture gfx1151 is none of those that this build has kernels for: gfx1030, gfx906");
}

TEST_CASE("HIP's failures are told to the caller and to nobody else") {
  const char fits[] = {6, 0}, differs[] = {5, 0};
  auto driver = open_hip_driver(
      {
          {"gfx1030", differs},
          {"gfx906",  fits   }
  },
      {DFLASH_FAKE_HIP}, "/nonexistent");
  REQUIRE(driver.ok());
  REQUIRE(make_module_runtime(std::move(driver).value(), 0).ok());  // the first object did not load
  auto library = DriverLibrary::open({DFLASH_FAKE_HIP});
  REQUIRE(library.ok());
  int (*last_error)() = nullptr;
  REQUIRE(library.value().find("hipGetLastError", last_error).ok());
  CHECK(last_error() == 0);
}

TEST_CASE(
    "HIP's device is the node at its place on the bus, whatever is hidden or in another order") {
  const std::string at = "domain 0\nlocation_id ";
  // c1:00.0, c3:00.0
  const Nodes nodes({node_of(100306) + at + "49408\n", node_of(90006) + at + "49920\n"});
  auto driver = open_hip_driver(
      {
          {"gfx906", kImage}
  },
      {DFLASH_FAKE_HIP}, nodes.path());
  REQUIRE(driver.ok());
  auto devices = driver.value()->list();
  REQUIRE(devices.ok());
  REQUIRE(devices.value().size() == 1);
  CHECK(devices.value()[0].facts.architecture == "gfx906");
  CHECK(devices.value()[0].reason.empty());
  CHECK(bus_place("0001:c3:1f.7") == uint64_t{0x1c3ff});
  CHECK_FALSE(bus_place("c3:00").has_value());
}

TEST_CASE("HIP's device is of the architecture that its owner overrides it with") {
  const Environment override_it("HSA_OVERRIDE_GFX_VERSION", "10.3.0");
  const Nodes nodes({node_of(100302)});
  auto driver = open_hip_driver(
      {
          {"gfx1030", kImage}
  },
      {DFLASH_FAKE_HIP}, nodes.path());
  REQUIRE(driver.ok());
  auto devices = driver.value()->list();
  REQUIRE(devices.ok());
  CHECK(devices.value()[0].facts.architecture == "gfx1030");
  CHECK(devices.value()[0].reason.empty());
}

TEST_CASE("a runtime that the process has already is found by its name") {
  const std::string path = DFLASH_FAKE_HIP;
  REQUIRE(DriverLibrary::open({path}).ok());
  const std::vector<std::string> found = loaded_libraries(path.substr(path.rfind('/') + 1));
  REQUIRE(found.size() == 1);
  CHECK(found[0] == path);
  CHECK(loaded_libraries("libhip-that-is-not-there").empty());
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
  const Nodes nodes(
      {"gfx_target_version 0\n", node_of(90010),
       "simd_count 64\nsimd_per_cu 2\nwave_front_size 32\ngfx_target_version 110000\n"});
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

TEST_CASE("two cards of one thread, in turn: each is current for its own work") {
  const Environment twins("FAKE_CUDA", "twins");
  auto left = make_module_runtime(fake_cuda(), 0), right = make_module_runtime(fake_cuda(), 1);
  REQUIRE(left.ok());
  REQUIRE(right.ok());
  for (DeviceRuntime* runtime : {left.value().get(), right.value().get(), left.value().get()}) {
    CHECK(runtime->mark(Mark::kBegin).ok());
    const auto ended = runtime->wait(std::chrono::seconds(5));
    REQUIRE(ended.ok());
    CHECK(ended.value());
  }
}

TEST_CASE(
    "a framework that changes the device between two operations does not lead the second astray") {
  auto driver = fake_cuda();
  DriverApi& api = *driver;
  auto made = make_module_runtime(std::move(driver), 0);
  REQUIRE(made.ok());
  int theirs = 0;
  REQUIRE(api.restore(&theirs) == 0);
  CHECK(made.value()->mark(Mark::kBegin).ok());
}

TEST_CASE("a context that is given up is current for nobody") {
  std::thread fresh([] {
    auto runtime = fake_runtime();
    runtime.reset();
    void* current = nullptr;
    REQUIRE(fake_cuda()->current(&current) == 0);
    CHECK(current == nullptr);
  });
  fresh.join();
}

TEST_CASE(
    "registering the host's memory: each refusal is typed with the driver's words, and the device "
    "goes on") {
  std::byte memory[64];
  struct Case {
    const char* fault;
    bool is_read_only, is_taken;
  };
  for (const Case& one : {
           Case{"",           true,  true },
           Case{"unreadable", true,  false},
           Case{"unreadable", false, true },
           Case{"sealed",     false, false}
  }) {
    CAPTURE(one.fault);
    const Environment fault("FAKE_CUDA", one.fault);
    auto runtime = fake_runtime();
    auto mapped = runtime->map_host(memory, sizeof memory, one.is_read_only);
    CHECK(mapped.ok() == one.is_taken);
    if (mapped.ok()) {
      CHECK(mapped.value() == memory);
      runtime->unmap_host(memory);
    } else {
      CHECK(mapped.error().code == ErrorCode::kUnsupported);
      CHECK(mapped.error().message == std::string("registering 64 bytes of the host's memory") +
                                          (one.is_read_only ? " to be read" : "") +
                                          " failed: unknown error (CUDA error 801)");
    }
    CHECK(runtime->free_bytes().ok());
  }
  const char fits[] = {6, 0};
  auto hip = open_hip_driver(
      {
          {"gfx906", fits}
  },
      {DFLASH_FAKE_HIP}, "/nonexistent");
  REQUIRE(hip.ok());
  auto runtime = make_module_runtime(std::move(hip).value(), 0);
  REQUIRE(runtime.ok());
  CHECK_FALSE(runtime.value()->map_host(memory, sizeof memory, true).ok());
  CHECK(runtime.value()->map_host(memory, sizeof memory, false).ok());
}

TEST_CASE("work is queued on a borrowed stream until it is returned") {
  auto runtime = fake_runtime();
  const uint64_t own = runtime->stream();
  CHECK(own != 0);
  runtime->borrow_queue(0);  // a framework's default stream
  CHECK(runtime->wait(std::chrono::seconds(5)).value());
  CHECK(runtime->stream() == own);
  runtime->return_queue();
  CHECK(runtime->wait(std::chrono::seconds(5)).value());
}
