// Reads by O_DIRECT where the file system has it, see direct_file.h.
// SPDX-License-Identifier: Apache-2.0
#include "store/direct_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace dflash::store {
namespace {

Error read_error(const std::string& path, const std::string& what) {
  return Error{ErrorCode::kCheckpoint, path + ": " + what};
}

bool set_direct(int fd, bool is_direct) {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && ::fcntl(fd, F_SETFL, is_direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

}  // namespace

Result<std::unique_ptr<DirectFile>> DirectFile::of_descriptor(OwnedFd fd, const std::string& path) {
  struct stat facts{};
  if (::fstat(fd.get(), &facts) != 0)
    return read_error(path, std::string("cannot be examined: ") + std::strerror(errno));
  const bool is_direct = set_direct(fd.get(), true);
  return std::unique_ptr<DirectFile>(
      new DirectFile(path, std::move(fd), static_cast<uint64_t>(facts.st_size), is_direct));
}

// Some file systems take the flag and refuse the reads.
void DirectFile::stop_being_direct() const {
  set_direct(fd_.get(), false);
  is_direct_.store(false, std::memory_order_relaxed);
}

Status DirectFile::read(uint64_t offset, size_t num_bytes, std::byte* to) const {
  const uint64_t begin = offset;
  size_t done = 0;
  while (done < num_bytes) {
    const ssize_t got =
        ::pread(fd_.get(), to + done, num_bytes - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EINVAL && is_direct()) {
      stop_being_direct();
      continue;
    }
    if (got < 0) return read_error(path_, std::string("cannot be read: ") + std::strerror(errno));
    if (got == 0)
      return read_error(path_, "ends at byte " + std::to_string(offset + done) + ", but had " +
                                   std::to_string(size_bytes_) + " bytes when it was opened");
    done += static_cast<size_t>(got);
  }
  if (!is_direct())
    static_cast<void>(::posix_fadvise(fd_.get(), static_cast<off_t>(begin),
                                      static_cast<off_t>(num_bytes), POSIX_FADV_DONTNEED));
  return ok();
}

}  // namespace dflash::store
