// Owns a file descriptor and closes it at its end. It can be moved, not copied.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <utility>

#include "base/result.h"

namespace dflash {

class OwnedFd {
 public:
  OwnedFd() = default;
  explicit OwnedFd(int fd) : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept {
    if (this != &other) {
      close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  OwnedFd(const OwnedFd&) = delete;
  OwnedFd& operator=(const OwnedFd&) = delete;
  ~OwnedFd() { close(); }

  // Returns another descriptor of the same open file; `fd` stays its owner's. Errors: kSystem.
  static Result<OwnedFd> duplicate(int fd) {
    OwnedFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!copy.is_open()) return system_error("cannot duplicate a descriptor");
    return copy;
  }

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

}  // namespace dflash
