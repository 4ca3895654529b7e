// Maps anonymous memory, see page_buffer.h.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/page_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <string>

namespace dflash::compute {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
// Pages of a region that no block has touched cost address space alone.
constexpr size_t kRegionBytes = size_t{64} << 20;

}  // namespace

class PageBuffer::Mapping {
 public:
  Mapping(void* start, size_t num_bytes) : start_(start), num_bytes_(num_bytes) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { munmap(start_, num_bytes_); }

 private:
  void* start_;
  size_t num_bytes_;
};

Result<PageBuffer> PageBuffer::create(size_t num_bytes) {
  PageBuffer buffer;
  if (num_bytes == 0) return buffer;
  const bool is_large = num_bytes >= kHugePage;
  const size_t slack = is_large ? kHugePage : 0;
  void* start = num_bytes > SIZE_MAX - slack
                    ? MAP_FAILED
                    : mmap(nullptr, num_bytes + slack, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) {
    return Error{ErrorCode::kOutOfMemory,
                 "cannot map " + std::to_string(num_bytes) +
                     " bytes for weights, keys and values, or scratch memory"};
  }
  buffer.mapping_ = std::make_shared<Mapping>(start, num_bytes + slack);
  buffer.num_bytes_ = num_bytes;
  const uintptr_t at = reinterpret_cast<uintptr_t>(start);
  buffer.data_ =
      static_cast<std::byte*>(start) + (is_large ? (kHugePage - at % kHugePage) % kHugePage : 0);
  // Only a hint: the call fails where huge pages are switched off.
  if (is_large) static_cast<void>(madvise(buffer.data_, num_bytes, MADV_HUGEPAGE));
  return buffer;
}

void PageBuffer::forget(size_t offset, size_t num_bytes) const {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(data_ + offset);
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t end = (begin + num_bytes) / page * page;
  if (first < end)
    static_cast<void>(madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED));
}

Result<PageBuffer> PageArena::take(size_t num_bytes) {
  // Such a block fills huge pages of its own, and would leave much of a region unused.
  if (num_bytes == 0 || num_bytes > kRegionBytes / 4) return PageBuffer::create(num_bytes);
  const std::lock_guard lock(mutex_);
  if (num_bytes > region_.num_bytes() - num_taken_) {
    auto region = PageBuffer::create(kRegionBytes);
    if (!region.ok()) return std::move(region).error();
    region_ = std::move(region).value();
    num_taken_ = 0;
  }
  PageBuffer block;
  block.mapping_ = region_.mapping_;
  block.data_ = region_.data_ + num_taken_;
  block.num_bytes_ = num_bytes;
  num_taken_ += (num_bytes + 63) / 64 * 64;  // at most the region's bytes, which are whole lines
  return block;
}

}  // namespace dflash::compute
