// The handshakes of socket pairs and of dialled connections, which differ only at the host's end,
// and a dialled connection of this process with itself.
// SPDX-License-Identifier: Apache-2.0

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <utility>

#include "base/result.h"
#include "transport/kinds.h"
#include "transport/ring/layout.h"
#include "transport/stream/stream.h"

namespace dflash::transport {
namespace {

StreamOptions options_of(const PathTerms& terms) {
  return {terms.socket_buffer_bytes, terms.socket_buffer_bytes, terms.user_timeout_ms};
}

// The one connection that a checked handover brought.
StreamSocket socket_of(Handover handover) {
  if (handover.secured != nullptr) return StreamSocket(std::move(handover.secured));
  return StreamSocket(std::move(handover.descriptors[0]));
}

class UnixOffer final : public PathOffer {
 public:
  UnixOffer(const PathTerms& terms, OwnedFd own, OwnedFd theirs)
      : terms_(terms), own_(std::move(own)), theirs_(std::move(theirs)) {}

  std::vector<int> descriptors() const override { return {theirs_.get()}; }
  Result<std::unique_ptr<Channel>> complete(Handover answer) override {
    DFLASH_TRY(check_handover(kUnixKind, "answer", answer, 0));
    theirs_.close();  // while this end held it open, the worker's hang-up could not be seen
    return make_stream_channel(Side::kHost, terms_.geometry, std::move(own_), options_of(terms_));
  }

 private:
  const PathTerms terms_;
  OwnedFd own_, theirs_;
};

class TcpOffer final : public PathOffer {
 public:
  explicit TcpOffer(const PathTerms& terms) : terms_(terms) {}

  std::vector<int> descriptors() const override { return {}; }
  Result<std::unique_ptr<Channel>> complete(Handover answer) override {
    DFLASH_TRY(check_handover(kTcpKind, "answer", answer, 1));
    return make_stream_channel(Side::kHost, terms_.geometry, socket_of(std::move(answer)),
                               options_of(terms_));
  }

 private:
  const PathTerms terms_;
};

Result<Acceptance> accept_stream(const TransportKind& kind, const PathTerms& terms,
                                 Handover offered) {
  DFLASH_TRY(check_handover(kind, "offer", offered, 1));
  auto channel = make_stream_channel(Side::kWorker, terms.geometry, socket_of(std::move(offered)),
                                     options_of(terms));
  if (!channel.ok()) return std::move(channel).error();
  return Acceptance{std::move(channel).value(), {}};
}

}  // namespace

Result<std::unique_ptr<PathOffer>> offer_unix(const PathTerms& terms) {
  DFLASH_TRY(check_geometry(terms.geometry));
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    return system_error("cannot make the socket pair of a path");
  return std::unique_ptr<PathOffer>(
      std::make_unique<UnixOffer>(terms, OwnedFd(ends[0]), OwnedFd(ends[1])));
}

Result<Acceptance> accept_unix(const PathTerms& terms, Handover offered) {
  return accept_stream(kUnixKind, terms, std::move(offered));
}

Result<std::unique_ptr<PathOffer>> offer_tcp(const PathTerms& terms) {
  DFLASH_TRY(check_geometry(terms.geometry));
  return std::unique_ptr<PathOffer>(std::make_unique<TcpOffer>(terms));
}

Result<Acceptance> accept_tcp(const PathTerms& terms, Handover offered) {
  return accept_stream(kTcpKind, terms, std::move(offered));
}

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
