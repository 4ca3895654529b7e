// The plain half: vectored reads and writes of a socket.
// SPDX-License-Identifier: Apache-2.0
#include "transport/secure/stream_socket.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace dflash::transport {
namespace {

msghdr message_of(std::span<const iovec> pieces) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces.data());
  message.msg_iovlen = pieces.size();
  return message;
}

}  // namespace

Result<size_t> StreamSocket::send(std::span<const iovec> pieces) {
  if (secure_ != nullptr) return secure_->send(pieces);
  const msghdr message = message_of(pieces);
  ssize_t taken;
  do {
    taken = ::sendmsg(plain_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (taken < 0 && errno == EINTR);
  if (taken >= 0) return static_cast<size_t>(taken);
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) return size_t{0};
  return Error{ErrorCode::kWorkerLost, std::string("sending failed: ") + std::strerror(errno)};
}

Result<size_t> StreamSocket::receive(std::span<const iovec> pieces) {
  if (secure_ != nullptr) return secure_->receive(pieces);
  msghdr message = message_of(pieces);
  ssize_t got;
  do {
    got = ::recvmsg(plain_.get(), &message, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  if (got > 0) return static_cast<size_t>(got);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return size_t{0};
  return Error{ErrorCode::kWorkerLost,
               got == 0 ? std::string("the peer hung up")
                        : std::string("receiving failed: ") + std::strerror(errno)};
}

}  // namespace dflash::transport
