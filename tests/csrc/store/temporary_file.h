// A file that goes away with the test, and that the test writes and cuts off meanwhile.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "base/owned_fd.h"

namespace dflash::store {

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::vector<std::byte>& content) : fd_(::mkstemp(path_.data())) {
    REQUIRE(fd_.is_open());
    write(0, content);
  }
  // Of bytes 0, 1, 2 ...
  static std::vector<std::byte> counting(size_t num_bytes) {
    std::vector<std::byte> content(num_bytes);
    for (size_t i = 0; i < num_bytes; ++i) content[i] = static_cast<std::byte>(i);
    return content;
  }
  ~TemporaryFile() { ::unlink(path_.c_str()); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  const char* path() const { return path_.c_str(); }
  int fd() const { return fd_.get(); }
  void write(off_t at, const std::vector<std::byte>& bytes) const {
    REQUIRE(::pwrite(fd_.get(), bytes.data(), bytes.size(), at) ==
            static_cast<ssize_t>(bytes.size()));
  }
  void shorten(off_t num_bytes) const { REQUIRE(::ftruncate(fd_.get(), num_bytes) == 0); }
  // Sets the times to those of now, as `touch` does.
  void touch() const { REQUIRE(::futimens(fd_.get(), nullptr) == 0); }

 private:
  std::string path_ = std::filesystem::temp_directory_path() / "store_test_XXXXXX";
  OwnedFd fd_;
};

}  // namespace dflash::store
