// The stream channel: a send queue, an assembler and one non-blocking socket. poll() moves bytes in
// both directions, so that two sides whose sockets are both full still make progress.
// SPDX-License-Identifier: Apache-2.0
#include "transport/stream/stream.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/result.h"
#include "transport/ring/layout.h"
#include "transport/ring/mapping.h"
#include "transport/stream/assembler.h"
#include "transport/stream/send_queue.h"

namespace dflash::transport {
namespace {

constexpr int kReadsPerPoll = 64;  // bounds one poll() against a peer that sends without pause

class StreamChannel final : public Channel {
 public:
  StreamChannel(Side side, const SlotGeometry& geometry, StreamSocket socket, const char* kind,
                Mapping memory)
      : geometry_(geometry),
        socket_(std::move(socket)),
        kind_(kind),
        memory_(std::move(memory)),
        outgoing_bytes_(side == Side::kHost ? geometry.request_bytes : geometry.reply_bytes),
        incoming_bytes_(side == Side::kHost ? geometry.reply_bytes : geometry.request_bytes),
        assembler_({memory_.base() + geometry.num_slots * outgoing_bytes_,
                    geometry.num_slots * incoming_bytes_},
                   geometry.num_slots, incoming_bytes_) {}

  const SlotGeometry& geometry() const override { return geometry_; }
  const char* kind() const override { return kind_; }

  std::span<std::byte> outgoing(uint32_t slot) override {
    check(slot < geometry_.num_slots, "outgoing slot out of range");
    return {memory_.base() + slot * outgoing_bytes_, outgoing_bytes_};
  }

  Status publish(uint32_t slot, size_t bytes) override {
    if (slot >= geometry_.num_slots || bytes > outgoing_bytes_ ||
        queue_.is_full(geometry_.num_slots)) {
      return Error{ErrorCode::kInvalidArgument,
                   std::string(kind_) + " channel: publish of " + std::to_string(bytes) +
                       " bytes in slot " + std::to_string(slot) + "; there are " +
                       std::to_string(geometry_.num_slots) + " slots of " +
                       std::to_string(outgoing_bytes_) + " bytes, each under way at most once"};
    }
    if (broken_) return *broken_;
    if (send_failure_) return *send_failure_;
    const bool was_empty = queue_.is_empty();
    queue_.push(slot, outgoing(slot).first(bytes));
    if (!was_empty) return ok();  // the socket was just full; poll() goes on in order
    flush();
    return send_failure_ ? Status(*send_failure_) : ok();
  }

  Result<std::optional<Arrival>> poll() override {
    if (broken_) return *broken_;
    for (int read = 0;; ++read) {
      const bool sent = flush();
      auto next = assembler_.next();
      if (!next.ok()) {
        broken_ = next.error();
        return next;
      }
      // What the last read has completed is given out now: the descriptor would not tell of it, and
      // the caller would sleep on it.
      if (next.value().has_value() || read == kReadsPerPoll) return next;
      auto received = receive();
      if (!received.ok()) {
        broken_ = std::move(received).error();
        return *broken_;
      }
      if (received.value() > 0 || sent) continue;
      // Messages that came before the peer went are delivered first. Only then is a failed send of
      // this side reported.
      if (send_failure_) {
        broken_ = send_failure_;
        return *broken_;
      }
      return next;
    }
  }

  WakeSource arm(SleepKind) override {
    WakeSource source;
    source.fd = socket_.fd();
    const bool is_sending = !queue_.is_empty() || socket_.has_unsent();
    source.events = static_cast<short>(is_sending ? POLLIN | POLLOUT : POLLIN);
    source.is_level_triggered = true;
    return source;
  }
  void disarm() override {}
  // The descriptor says nothing about bytes that were taken from the kernel and not decrypted yet.
  int64_t next_event_ns() const override {
    return socket_.has_pending() ? 0 : Channel::next_event_ns();
  }

 private:
  // Sends on what is queued. Returns whether the socket took some of it; a failure is kept for
  // poll() and publish().
  bool flush() {
    if (send_failure_) return false;
    if (queue_.is_empty()) {
      if (auto flushed = socket_.flush(); !flushed.ok())
        send_failure_ = std::move(flushed).error().with("stream channel");
      return false;
    }
    auto sent = queue_.flush(socket_);
    if (!sent.ok()) {
      send_failure_ = std::move(sent).error();
      return false;
    }
    return sent.value() > 0;
  }

  // Returns the bytes read, 0 where there are none now. Errors: those of StreamSocket::receive.
  Result<size_t> receive() {
    const Assembler::Room room = assembler_.room();
    iovec pieces[2];
    size_t num_pieces = 0;
    for (const std::span<std::byte> piece : {room.slot, room.staging}) {
      if (!piece.empty()) pieces[num_pieces++] = {piece.data(), piece.size()};
    }
    auto received = socket_.receive(std::span(pieces).first(num_pieces));
    if (!received.ok()) {
      Error failed = std::move(received).error().with(std::string(kind_) + " channel");
      if (assembler_.is_mid_message()) failed.message += " in the middle of a message";
      return failed;
    }
    if (received.value() > 0) assembler_.filled(received.value());
    return received;
  }

  SlotGeometry geometry_;
  StreamSocket socket_;
  const char* kind_;
  Mapping memory_;  // the outgoing slots, then the incoming ones
  uint64_t outgoing_bytes_, incoming_bytes_;
  SendQueue queue_;
  Assembler assembler_;
  std::optional<Error> send_failure_;
  std::optional<Error> broken_;
};

Error socket_error(const char* what) {
  return system_error(std::string("stream channel: ") + what);
}

Status set_option(int socket, int level, int option, int value, const char* name) {
  if (::setsockopt(socket, level, option, &value, sizeof value) == 0) return ok();
  return socket_error(name);
}

Status configure(int socket, bool is_tcp, const StreamOptions& options) {
  const int flags = ::fcntl(socket, F_GETFL);
  if (flags < 0 || ::fcntl(socket, F_SETFL, flags | O_NONBLOCK) != 0)
    return socket_error("O_NONBLOCK");
  if (options.send_buffer_bytes > 0) {
    DFLASH_TRY(set_option(socket, SOL_SOCKET, SO_SNDBUF, options.send_buffer_bytes, "SO_SNDBUF"));
  }
  if (options.receive_buffer_bytes > 0) {
    DFLASH_TRY(
        set_option(socket, SOL_SOCKET, SO_RCVBUF, options.receive_buffer_bytes, "SO_RCVBUF"));
  }
  if (!is_tcp) return ok();
  DFLASH_TRY(set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY"));
  if (options.user_timeout_ms <= 0) return ok();
  return set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, options.user_timeout_ms,
                    "TCP_USER_TIMEOUT");
}

}  // namespace

Result<std::unique_ptr<Channel>> make_stream_channel(Side side, const SlotGeometry& geometry,
                                                     StreamSocket socket,
                                                     const StreamOptions& options) {
  DFLASH_TRY(check_geometry(geometry));
  sockaddr_storage address{};
  socklen_t address_bytes = sizeof address;
  if (::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &address_bytes) != 0) {
    return socket_error("this descriptor is no socket");
  }
  const bool is_unix = address.ss_family == AF_UNIX;
  if (!is_unix && address.ss_family != AF_INET && address.ss_family != AF_INET6) {
    return Error{ErrorCode::kInvalidArgument, "stream channel: a socket of family " +
                                                  std::to_string(address.ss_family) +
                                                  " is neither Unix nor TCP"};
  }
  DFLASH_TRY(configure(socket.fd(), !is_unix, options));
  auto memory =
      Mapping::create(geometry.num_slots * (geometry.request_bytes + geometry.reply_bytes));
  if (!memory.ok()) return std::move(memory).error();
  return std::unique_ptr<Channel>(std::make_unique<StreamChannel>(
      side, geometry, std::move(socket), is_unix ? "unix" : "tcp", std::move(memory).value()));
}

}  // namespace dflash::transport
