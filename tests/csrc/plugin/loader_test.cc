// What the loader says of plug-ins that are missing, broken, or built for another core. None of it
// may end the process.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "failed.h"
#include "plugin/loader.h"

namespace {

using namespace dflash;
using namespace dflash::plugin;

// A folder of its own, removed with everything in it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "dflash-plugin-XXXXXX").string();
    REQUIRE(::mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

std::string refusal(const dflash_backend_table& table) {
  const Status checked = check_table(&table, "cpu", "libdflash_cpu.so");
  return checked.ok() ? "" : checked.error().message;
}

}  // namespace

TEST_CASE("a plug-in that is not there, or is no library, is a typed reason with what to do") {
  const TemporaryFolder folder;
  auto missing = load_backend("cuda", folder.path());
  REQUIRE(missing == Failed(ErrorCode::kUnsupported));
  CHECK(missing.error().message ==
        "backend 'cuda': plug-in libdflash_cuda.so is not next to the core; build it with `make "
        "plugins`, or install the package dflash-moe-cuda");
  CHECK(load_backend("sim", folder.path()).error().message == Has{"`make core`"});

  std::ofstream(folder.path() + "/libdflash_hip.so") << "no library";
  auto broken = load_backend("hip", folder.path());
  REQUIRE_FALSE(broken.ok());
  CHECK(broken.error().message.find("backend 'hip': plug-in libdflash_hip.so cannot be opened") ==
        0);

  CHECK(load_backend("metal", folder.path()) == Failed(ErrorCode::kInvalidArgument));
}

TEST_CASE("the processor's backend needs no file, and its device is usable") {
  auto table = load_backend("cpu", "/nonexistent");
  REQUIRE(table.ok());
  CHECK(table.value() == cpu_table());
  auto devices = list_devices(*table.value());
  REQUIRE(devices.ok());
  REQUIRE(devices.value().size() == 1);
  CHECK(devices.value()[0].reason.empty());
  CHECK(devices.value()[0].memory_bytes > 0);
}

TEST_CASE(
    "a table of another version, size, name or release is refused before anything in it is "
    "called") {
  CHECK(refusal(*cpu_table()).empty());
  dflash_backend_table table = *cpu_table();
  table.struct_size -= 8;
  CHECK(refusal(table) == Has{"was built for another core"});
  table = *cpu_table();
  table.struct_size += 64;  // a later one that only appended
  CHECK(refusal(table).empty());
  table = *cpu_table();
  table.abi_version = DFLASH_BACKEND_ABI_VERSION + 1;
  CHECK(refusal(table).find("was built for another core (table version") != std::string::npos);
  table = *cpu_table();
  table.name = "hip";
  CHECK(refusal(table) == Has{"one of backend 'hip'"});
  table = *cpu_table();
  table.wait = nullptr;
  CHECK(refusal(table) == Has{"incomplete table"});
  table = *cpu_table();
  table.version = "0.0.0-other";
  CHECK(refusal(table) == Has{"is of version 0.0.0-other"});
  CHECK_FALSE(check_table(nullptr, "cuda", "libdflash_cuda.so").ok());
}

TEST_CASE("the folder of the core is one that exists") {
  CHECK(std::filesystem::is_directory(own_directory()));
}
