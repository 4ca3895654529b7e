// Samples and stub pages, as `dflash-moe model stub` writes them.
// SPDX-License-Identifier: Apache-2.0
#include "c_interface/tensor_check.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string_view>

#include "base/checksum.h"
#include "wire/little_endian.h"

namespace dflash::c_interface {
namespace {

constexpr size_t kNumPieces = 16, kPieceBytes = 256;
constexpr size_t kSampleBytes = kNumPieces * kPieceBytes;
constexpr size_t kExpertAt = kStubMarkBytes + kFingerprintBytes;
constexpr size_t kNameLengthAt = kExpertAt + 4, kNameAt = kNameLengthAt + 4;
static_assert(kNameAt + wire::kMaxTensorNameBytes <= kLeastHeaderRegion);

Error differs(const wire::PlannedTensor& tensor, const std::string& what) {
  return Error{ErrorCode::kInvalidArgument,
               "tensor " + tensor.name + " " + what + "; load the workers' own GGUF or its stub"};
}

std::optional<uint8_t> hex_digit(char c) {
  if (c >= '0' && c <= '9') return static_cast<uint8_t>(c - '0');
  if (c >= 'a' && c <= 'f') return static_cast<uint8_t>(c - 'a' + 10);
  return std::nullopt;
}

std::optional<std::array<std::byte, kFingerprintBytes>> decoded(const std::string& fingerprint) {
  std::array<std::byte, kFingerprintBytes> bytes;
  if (fingerprint.size() != 2 * bytes.size()) return std::nullopt;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const auto high = hex_digit(fingerprint[2 * i]), low = hex_digit(fingerprint[2 * i + 1]);
    if (!high || !low) return std::nullopt;
    bytes[i] = static_cast<std::byte>(*high << 4 | *low);
  }
  return bytes;
}

bool begins_with_mark(std::span<const std::byte> region) {
  return region.size() >= kLeastHeaderRegion &&
         std::memcmp(region.data(), kStubMark, kStubMarkBytes) == 0;
}

bool is_all_ones(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0xff}; });
}

Status check_header(const wire::PlannedTensor& tensor, const std::string& fingerprint,
                    uint32_t expert, std::span<const std::byte> region) {
  const std::string what = "is a stub whose page of expert " + std::to_string(expert) + " ";
  const auto expected = decoded(fingerprint);
  if (!begins_with_mark(region)) return differs(tensor, what + "lacks the mark");
  if (!expected ||
      std::memcmp(region.data() + kStubMarkBytes, expected->data(), expected->size()) != 0)
    return differs(tensor, what + "is of another model than the workers'");
  const uint32_t found = wire::load_le<uint32_t>(region, kExpertAt);
  const uint32_t length = wire::load_le<uint32_t>(region, kNameLengthAt);
  const bool has_name =
      length == tensor.name.size() && length <= wire::kMaxTensorNameBytes &&
      std::memcmp(region.data() + kNameAt, tensor.name.data(), tensor.name.size()) == 0;
  if (found != expert || !has_name)
    return differs(tensor, what + "belongs to another expert or tensor");
  return ok();
}

}  // namespace

StubRegion stub_region(uint64_t file_offset, uint64_t expert_bytes, uint64_t expert) {
  const uint64_t begin = file_offset + expert * expert_bytes;
  const uint64_t page = (begin + kPageBytes - 1) / kPageBytes * kPageBytes;
  if (page + kPageBytes <= begin + expert_bytes) return {page - file_offset, kPageBytes};
  return {expert * expert_bytes, expert_bytes};
}

uint32_t tensor_sample(std::span<const std::byte> bytes) {
  if (bytes.size() <= kSampleBytes) return checksum(bytes);
  std::array<std::byte, kSampleBytes> sample;
  for (size_t i = 0; i < kNumPieces; ++i) {
    const size_t at = (bytes.size() - kPieceBytes) * i / (kNumPieces - 1);
    std::memcpy(&sample[i * kPieceBytes], &bytes[at], kPieceBytes);
  }
  return checksum(sample);
}

Result<bool> check_tensor(const wire::PlannedTensor& tensor, uint32_t num_experts,
                          const std::string& fingerprint, std::span<const std::byte> bytes) {
  if (bytes.size() != tensor.num_bytes) {
    return differs(tensor, "has " + std::to_string(bytes.size()) + " bytes, that of the workers " +
                               std::to_string(tensor.num_bytes));
  }
  const bool may_be_stub = tensor.extents.size() >= 2 &&
                           tensor.name.find("_exps.") != std::string::npos && num_experts > 0 &&
                           !bytes.empty() && bytes.size() % num_experts == 0;
  if (may_be_stub) {
    const uint64_t expert_bytes = bytes.size() / num_experts;
    const auto region_of = [&](uint32_t expert) {
      const StubRegion region = stub_region(tensor.file_offset, expert_bytes, expert);
      return bytes.subspan(region.offset, region.num_bytes);
    };
    if (begins_with_mark(region_of(0))) {
      for (uint32_t expert = 0; expert < num_experts; ++expert)
        DFLASH_TRY(check_header(tensor, fingerprint, expert, region_of(expert)));
      return true;
    }
    // Regions without room for a header are whole experts, so that all of the tensor is 0xFF.
    if (expert_bytes < kLeastHeaderRegion && is_all_ones(bytes)) return true;
  }
  if (!tensor.has_sample)
    return differs(tensor,
                   "is no stub, and the supervisor has a stub only: nothing says that it "
                   "is the tensor of the workers");
  if (tensor_sample(bytes) != tensor.sample)
    return differs(tensor, "has another content than that of the workers");
  return false;
}

}  // namespace dflash::c_interface
