// A file of panels that is read into memory of the reader's own, past the page cache where the file
// system allows that: whoever has room for a part of a model only keeps what it uses, and would
// otherwise push everything else of the machine out of its memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/owned_fd.h"
#include "base/result.h"

namespace dflash::store {

// Any thread.
class DirectFile {
 public:
  // Offsets, sizes and addresses of reads are multiples of it: the largest block of disks in use.
  static constexpr size_t kBlockBytes = 4096;

  // The file keeps the descriptor, and with it the locks of flock() on it; `path` is what errors
  // call it. Errors: kCheckpoint.
  static Result<std::unique_ptr<DirectFile>> of_descriptor(OwnedFd fd, const std::string& path);

  const std::string& path() const { return path_; }
  uint64_t size_bytes() const { return size_bytes_; }
  // Whether reads go past the page cache. Where they cannot, what was read is dropped from it.
  bool is_direct() const { return is_direct_.load(std::memory_order_relaxed); }
  // Reads whole blocks. Errors: kCheckpoint where the file cannot be read or has become shorter.
  Status read(uint64_t offset, size_t num_bytes, std::byte* to) const;

 private:
  DirectFile(std::string path, OwnedFd fd, uint64_t size_bytes, bool is_direct)
      : path_(std::move(path)),
        fd_(std::move(fd)),
        size_bytes_(size_bytes),
        is_direct_(is_direct) {}
  void stop_being_direct() const;

  const std::string path_;
  const OwnedFd fd_;
  const uint64_t size_bytes_;
  mutable std::atomic<bool> is_direct_;
};

}  // namespace dflash::store
