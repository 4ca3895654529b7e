// SPDX-License-Identifier: Apache-2.0
#include "transport/stream/tcp_pair.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "base/result.h"

namespace dflash::transport {

Result<std::pair<OwnedFd, OwnedFd>> tcp_pair() {
  const OwnedFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!listener.is_open()) return system_error("socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener.get(), generic, length) != 0) return system_error("bind to 127.0.0.1");
  if (::listen(listener.get(), 1) != 0) return system_error("listen");
  if (::getsockname(listener.get(), generic, &length) != 0) return system_error("getsockname");
  OwnedFd dialled(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!dialled.is_open()) return system_error("socket");
  if (::connect(dialled.get(), generic, length) != 0) return system_error("connect to 127.0.0.1");
  OwnedFd accepted(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!accepted.is_open()) return system_error("accept");
  return std::pair(std::move(dialled), std::move(accepted));
}

}  // namespace dflash::transport
