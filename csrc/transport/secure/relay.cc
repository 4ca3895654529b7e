// The relay's thread: it sleeps until one side can go on, and holds at most one buffer for each
// direction, so that a slow reader slows its sender down.
// SPDX-License-Identifier: Apache-2.0
#include "transport/secure/relay.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/result.h"
#include "transport/secure/stream_socket.h"

namespace dflash::transport {
namespace {

constexpr size_t kBufferBytes = 256 << 10;

// One direction: bytes that were received at one side and not sent at the other.
class Flow {
 public:
  Flow(StreamSocket& from, StreamSocket& to) : from_(from), to_(to), bytes_(kBufferBytes) {}

  bool is_empty() const { return begin_ == end_; }
  // Moves what can be moved now. Returns whether anything was.
  Result<bool> move() {
    bool has_moved = false;
    if (is_empty()) {
      const iovec room{bytes_.data(), bytes_.size()};
      auto received = from_.receive({&room, 1});
      if (!received.ok()) return std::move(received).error();
      begin_ = 0;
      end_ = received.value();
      has_moved = end_ > 0;
    }
    if (!is_empty()) {
      const iovec rest{bytes_.data() + begin_, end_ - begin_};
      auto sent = to_.send({&rest, 1});
      if (!sent.ok()) return std::move(sent).error();
      begin_ += sent.value();
      has_moved = has_moved || sent.value() > 0;
    }
    return has_moved;
  }

 private:
  StreamSocket& from_;
  StreamSocket& to_;
  std::vector<std::byte> bytes_;
  size_t begin_ = 0, end_ = 0;
};

}  // namespace

Result<std::unique_ptr<Relay>> Relay::start(std::unique_ptr<SecureSocket> secure) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    return system_error("cannot make the socket pair of a relay");
  OwnedFd ours(ends[0]), theirs(ends[1]);
  OwnedFd bell(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!bell.is_open()) return system_error("cannot make the bell of a relay");
  std::unique_ptr<Relay> relay(
      new Relay(std::move(secure), std::move(ours), std::move(theirs), std::move(bell)));
  try {
    relay->thread_ = std::thread([self = relay.get()] { self->run(); });
  } catch (const std::system_error& error) {
    return Error{ErrorCode::kSystem, std::string("cannot start a relay: ") + error.what()};
  }
  return relay;
}

Relay::Relay(std::unique_ptr<SecureSocket> secure, OwnedFd ours, OwnedFd theirs, OwnedFd bell)
    : secure_(std::move(secure)),
      ours_(std::move(ours)),
      theirs_(std::move(theirs)),
      bell_(std::move(bell)) {}

Relay::~Relay() {
  const uint64_t rung = 1;
  // The counter of a bell that is rung once cannot overflow, so that the write succeeds.
  [[maybe_unused]] const ssize_t written = ::write(bell_.get(), &rung, sizeof rung);
  if (thread_.joinable()) thread_.join();
}

void Relay::run() {
  StreamSocket far(std::move(secure_));
  StreamSocket near(std::move(ours_));
  Flow in(far, near), out(near, far);
  for (;;) {
    auto moved_in = in.move();
    auto moved_out = out.move();
    // The sockets close here, which both peers see as a hang-up. Bytes that came before it and that
    // the other side has no room for are lost with the connection, as they are on a plain one.
    if (!moved_in.ok() || !moved_out.ok() || !far.flush().ok()) return;
    if (moved_in.value() || moved_out.value() || (in.is_empty() && far.has_pending())) continue;
    const auto events = [](const Flow& incoming, bool is_sending) {
      return static_cast<short>((incoming.is_empty() ? POLLIN : 0) | (is_sending ? POLLOUT : 0));
    };
    pollfd awaited[] = {
        {far.fd(), events(in, !out.is_empty() || far.has_unsent()), 0},
        {near.fd(), events(out, !in.is_empty()), 0},
        {bell_.get(), POLLIN, 0}
    };
    // Ends with the connection, which hangs up at the latest when the kernel finds its peer gone,
    // or with the bell.
    ::poll(awaited, 3, -1);
    if (awaited[2].revents != 0) return;
  }
}

}  // namespace dflash::transport
