// Whether a tensor that a program has read is the one that the workers hold: by a sample of its
// bytes, or by the marks of a stub. Pure functions over bytes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/result.h"
#include "wire/handover_messages.h"

namespace dflash::c_interface {

// A stub's page of one expert begins with this mark, then the checkpoint's fingerprint (32 bytes),
// the expert and the length of the tensor's name (u32 little-endian each), and the name. All other
// bytes of the page are 0xFF, which no format reads as a number.
inline constexpr char kStubMark[] = "DFLASH-MOE-STUB1";
inline constexpr size_t kStubMarkBytes = 16;
inline constexpr size_t kFingerprintBytes = 32;
inline constexpr uint64_t kPageBytes = 4096;
// A smaller region has no header: it would leave no byte to be 0xFF.
inline constexpr uint64_t kLeastHeaderRegion = 512;

// Bytes of a tensor.
struct StubRegion {
  uint64_t offset = 0, num_bytes = 0;
};
// Where a stub says so for `expert` of a tensor whose experts have `expert_bytes` bytes each and
// which begins at `file_offset` in its file: the first whole page of the file within the expert, or
// all of the expert where none is.
StubRegion stub_region(uint64_t file_offset, uint64_t expert_bytes, uint64_t expert);

// The checksum (base/checksum.h) of 16 pieces of 256 bytes, evenly spaced from the first to the
// last of the tensor, or of all of it where it has at most 4,096.
uint32_t tensor_sample(std::span<const std::byte> bytes);

// Compares `bytes`, the whole tensor, with what the plan says. `num_experts` is its layer's, and
// `fingerprint` the checkpoint's in hexadecimal. Returns whether it is a stub's. Errors:
// kInvalidArgument saying how they differ.
Result<bool> check_tensor(const wire::PlannedTensor& tensor, uint32_t num_experts,
                          const std::string& fingerprint, std::span<const std::byte> bytes);

}  // namespace dflash::c_interface
