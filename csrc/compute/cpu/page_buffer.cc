// Maps anonymous memory, see page_buffer.h.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/page_buffer.h"

#include <sys/mman.h>

#include <cstdint>
#include <string>

namespace dflash::compute {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

Result<PageBuffer> PageBuffer::create(size_t num_bytes) {
  PageBuffer buffer;
  if (num_bytes == 0) return buffer;
  const bool is_large = num_bytes >= 4 * kHugePage;
  const size_t slack = is_large ? kHugePage : 0;
  void* mapping = num_bytes > SIZE_MAX - slack
                      ? MAP_FAILED
                      : mmap(nullptr, num_bytes + slack, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    return Error{ErrorCode::kOutOfMemory,
                 "cannot map " + std::to_string(num_bytes) +
                     " bytes for weights, keys and values, or scratch memory"};
  }
  buffer.mapping_ = mapping;
  buffer.mapping_bytes_ = num_bytes + slack;
  buffer.num_bytes_ = num_bytes;
  const uintptr_t at = reinterpret_cast<uintptr_t>(mapping);
  buffer.data_ =
      static_cast<std::byte*>(mapping) + (is_large ? (kHugePage - at % kHugePage) % kHugePage : 0);
  // Only a hint: the call fails where huge pages are switched off.
  if (is_large) static_cast<void>(madvise(buffer.data_, num_bytes, MADV_HUGEPAGE));
  return buffer;
}

PageBuffer::~PageBuffer() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

}  // namespace dflash::compute
