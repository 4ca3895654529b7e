// Reads the two variables and the token's pipe.
// SPDX-License-Identifier: Apache-2.0
#include "c_interface/connection.h"

#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "base/clock.h"
#include "base/owned_fd.h"

namespace dflash::c_interface {
namespace {

constexpr int64_t kTokenPatienceNs = 5'000'000'000;  // it was written before this program started

Error variable_error(const char* name, const std::string& what) {
  return Error{ErrorCode::kInvalidArgument, std::string(name) + " " + what +
                                                "; start this program with `dflash-moe llama -- "
                                                "PROGRAM`"};
}

// Only the very pipe that the supervisor made is read and closed. A program that another one
// started inherits the variable, but may have anything under that number.
Status read_token(std::string_view number,
                  std::array<std::byte, wire::kHandoverTokenBytes>& token) {
  int fd = -1;
  uint64_t inode = 0;
  const char* const end = number.data() + number.size();
  auto parsed = std::from_chars(number.data(), end, fd);
  if (parsed.ec == std::errc() && parsed.ptr != end && *parsed.ptr == ':')
    parsed = std::from_chars(parsed.ptr + 1, end, inode);
  if (parsed.ec != std::errc() || parsed.ptr != end || fd < 0 || inode == 0)
    return variable_error(kTokenVariable, "is no DESCRIPTOR:INODE");
  struct stat found{};
  if (::fstat(fd, &found) != 0 || !S_ISFIFO(found.st_mode) || found.st_ino != inode) {
    return variable_error(kTokenVariable, "names a descriptor " + std::to_string(fd) +
                                              " that is not the supervisor's pipe: the token was "
                                              "taken already, or this is not the program that was "
                                              "started");
  }
  const OwnedFd pipe(fd);
  const Deadline deadline = Deadline::after_ns(kTokenPatienceNs);
  for (size_t at = 0; at < token.size();) {
    pollfd one{fd, POLLIN, 0};
    const int is_ready = ::poll(&one, 1, static_cast<int>(deadline.left_ns() / 1'000'000));
    if (is_ready == 0)
      return Error{ErrorCode::kTimeout, std::string(kTokenVariable) + ": its pipe stays empty"};
    const ssize_t received = is_ready < 0 ? -1 : ::read(fd, token.data() + at, token.size() - at);
    if (received < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (received <= 0) {
      return variable_error(kTokenVariable, "names a pipe that holds " + std::to_string(at) +
                                                " of " + std::to_string(token.size()) + " bytes");
    }
    at += static_cast<size_t>(received);
  }
  return ok();
}

}  // namespace

Result<SupervisorAddress> find_supervisor(const char* path) {
  SupervisorAddress supervisor;
  const char* const named = path != nullptr ? path : std::getenv(kPathVariable);
  if (named == nullptr || *named == '\0')
    return variable_error(kPathVariable, "names no supervisor's socket");
  supervisor.path = named;
  const char* const number = std::getenv(kTokenVariable);
  if (number == nullptr && path == nullptr) return variable_error(kTokenVariable, "names no token");
  if (number != nullptr) DFLASH_TRY(read_token(number, supervisor.token));
  return supervisor;
}

}  // namespace dflash::c_interface
