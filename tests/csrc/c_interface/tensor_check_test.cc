// A tensor is known by its sample or by the pages of a stub; anything else is told apart.
// SPDX-License-Identifier: Apache-2.0
#include "c_interface/tensor_check.h"

#include <doctest/doctest.h>

#include <cstring>

#include "base/checksum.h"
#include "c_interface/stand_ins.h"
#include "failed.h"
#include "wire/little_endian.h"

namespace dflash::c_interface {
namespace {

const std::string kFingerprint = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

std::vector<std::byte> content(size_t num_bytes) {
  std::vector<std::byte> bytes(num_bytes);
  for (size_t i = 0; i < num_bytes; ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 251);
  return bytes;
}

wire::PlannedTensor planned(uint64_t expert_bytes, uint64_t file_offset) {
  wire::PlannedTensor tensor;
  tensor.layer = kLayer;
  tensor.name = "blk.5.ffn_up_exps.weight";
  tensor.extents = {expert_bytes, 1, kNumExperts};
  tensor.num_bytes = expert_bytes * kNumExperts;
  tensor.file_offset = file_offset;
  return tensor;
}

// A stub of the tensor: holes, which read as zeros, and a page for every expert.
std::vector<std::byte> stub_of(const wire::PlannedTensor& tensor) {
  std::vector<std::byte> bytes(tensor.num_bytes);
  const uint64_t expert_bytes = tensor.num_bytes / kNumExperts;
  for (uint32_t expert = 0; expert < kNumExperts; ++expert) {
    const StubRegion region = stub_region(tensor.file_offset, expert_bytes, expert);
    const auto page = std::span(bytes).subspan(region.offset, region.num_bytes);
    std::fill(page.begin(), page.end(), std::byte{0xff});
    if (page.size() < 512) continue;
    std::memcpy(page.data(), "DFLASH-MOE-STUB1", 16);
    for (size_t i = 0; i < 32; ++i) page[16 + i] = static_cast<std::byte>(i);
    wire::store_le<uint32_t>(expert, page, 48);
    wire::store_le<uint32_t>(static_cast<uint32_t>(tensor.name.size()), page, 52);
    std::memcpy(&page[56], tensor.name.data(), tensor.name.size());
  }
  return bytes;
}

Result<bool> checked(const wire::PlannedTensor& tensor, std::span<const std::byte> bytes) {
  return check_tensor(tensor, kNumExperts, kFingerprint, bytes);
}

TEST_CASE("a sample is of all of a small tensor, and of 16 pieces of a large one") {
  const auto small = content(4096);
  CHECK(tensor_sample(small) == checksum(small));
  const auto large = content(100'003);
  std::vector<std::byte> pieces;
  for (size_t i = 0; i < 16; ++i) {
    const auto at = static_cast<std::ptrdiff_t>((100'003 - 256) * i / 15);
    pieces.insert(pieces.end(), large.begin() + at, large.begin() + at + 256);
  }
  CHECK(tensor_sample(large) == checksum(pieces));
}

TEST_CASE("a tensor with the content of the workers passes, any other does not") {
  wire::PlannedTensor tensor = planned(10'000, 32);
  auto bytes = content(40'000);
  tensor.has_sample = true;
  tensor.sample = tensor_sample(bytes);
  CHECK(checked(tensor, bytes).ok());
  bytes.back() ^= std::byte{1};
  CHECK(checked(tensor, bytes).error().message == Has{"another content"});
  CHECK(checked(tensor, std::span(bytes).first(39'999)).error().message == Has{"39999 bytes"});
  tensor.has_sample = false;
  CHECK(checked(tensor, bytes).error().message == Has{"is no stub"});
}

TEST_CASE("a stub is known by every expert's page, wherever the file's pages lie") {
  for (const uint64_t expert_bytes : {512u, 5000u, 8192u, 12'300u, 300u}) {
    for (const uint64_t file_offset : {0u, 32u, 4064u}) {
      CAPTURE(expert_bytes);
      CAPTURE(file_offset);
      const wire::PlannedTensor tensor = planned(expert_bytes, file_offset);
      const auto stub = stub_of(tensor);
      const Result<bool> known = checked(tensor, stub);
      REQUIRE_MESSAGE(known.ok(), (known.ok() ? "" : known.error().message));
      CHECK(known.value());
      for (uint32_t expert = 0; expert < kNumExperts; ++expert) {
        const StubRegion region = stub_region(file_offset, expert_bytes, expert);
        for (const size_t at : {0u, 20u, 48u, 52u, 60u}) {
          auto broken = stub;
          broken[region.offset + at] ^= std::byte{0x10};
          CHECK_FALSE(checked(tensor, broken).ok());
        }
      }
    }
  }
}

TEST_CASE("the page of a stub is the first whole one of the file within the expert") {
  CHECK(stub_region(0, 8192, 1).offset == 8192);
  CHECK(stub_region(32, 8192, 1).offset == 12'288 - 32);
  CHECK(stub_region(32, 8192, 1).num_bytes == 4096);
  CHECK(stub_region(32, 4096, 1).offset == 4096);  // no whole page: all of the expert
  CHECK(stub_region(32, 4096, 1).num_bytes == 4096);
  CHECK(stub_region(4096, 4096, 2).offset == 8192);
  CHECK(stub_region(100, 200, 3).num_bytes == 200);
}

TEST_CASE("a tensor of one extent is never a stub") {
  wire::PlannedTensor tensor = planned(8192, 0);
  const auto stub = stub_of(tensor);
  tensor.extents = {tensor.num_bytes};
  CHECK_FALSE(checked(tensor, stub).ok());
  tensor.extents = {8192, 4};
  CHECK(checked(tensor, stub).ok());
  CHECK_FALSE(check_tensor(tensor, kNumExperts, "no fingerprint", stub).ok());
  tensor.name = "blk.5.ffn_up.weight";
  CHECK_FALSE(checked(tensor, stub).ok());
}

TEST_CASE("the C function checks tensors by name") {
  PlanOptions options;
  options.fingerprint = kFingerprint;
  options.tensors = {planned(8192, 0), planned(1000, 0)};
  options.tensors[1].name = "blk.5.ffn_down_exps.weight";
  options.tensors[1].has_sample = true;
  const auto bytes = content(4000);
  options.tensors[1].sample = tensor_sample(bytes);
  Scene scene(options);
  const auto check = [&](const char* name, std::span<const std::byte> all) {
    return dflash_moe_check_tensor(scene.client, name, all.data(), all.size());
  };
  CHECK(check("blk.5.ffn_up_exps.weight", stub_of(options.tensors[0])) == DFLASH_MOE_STUB);
  CHECK(check("blk.5.ffn_up_exps.weight", content(4 * 8192)) == DFLASH_MOE_MISMATCH);
  CHECK(check("blk.5.ffn_down_exps.weight", bytes) == DFLASH_MOE_OK);
  CHECK(check("blk.5.ffn_down_exps.weight", content(3999)) == DFLASH_MOE_MISMATCH);
  CHECK(check("blk.9.ffn_up_exps.weight", bytes) == DFLASH_MOE_MISMATCH);
  CHECK(std::string(dflash_moe_error()) == "the workers hold no tensor blk.9.ffn_up_exps.weight");
  CHECK(dflash_moe_check_tensor(scene.client, nullptr, nullptr, 0) == DFLASH_MOE_INVALID);
}

}  // namespace
}  // namespace dflash::c_interface
