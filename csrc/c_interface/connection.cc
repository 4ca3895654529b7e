// Frames with sendmsg and recvmsg on a non-blocking socket; every wait is a poll with what is left
// of a deadline. Reads never pass the end of a frame, so that descriptors belong to the message
// they came with.
// SPDX-License-Identifier: Apache-2.0
#include "c_interface/connection.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "wire/little_endian.h"

namespace dflash::c_interface {
namespace {

// One more than any honest message has: a list that was cut below it was cut by this process's own
// limit of open files.
constexpr size_t kRoom = wire::kMaxHandoverDescriptors + 1;
constexpr int64_t kNapNs = 10'000'000;  // between two tries to connect to a busy listener

Error hung_up() { return Error{ErrorCode::kClosed, "the supervisor hung up"}; }

// Waits for `events`. Errors: kTimeout.
Status await(int fd, short events, Deadline deadline) {
  for (;;) {
    pollfd one{fd, events, 0};
    const int64_t left_ms = (deadline.left_ns() + 999'999) / 1'000'000;
    const int found = ::poll(&one, 1, static_cast<int>(std::min<int64_t>(left_ms, 1'000'000)));
    if (found > 0) return ok();
    if (found < 0 && errno != EINTR) return system_error("cannot wait for the supervisor");
    if (deadline.has_passed())
      return Error{ErrorCode::kTimeout, "the supervisor did not answer in time"};
  }
}

Status connect_to(int fd, const sockaddr_un& address, const std::string& path, Deadline deadline) {
  const std::string what = "cannot connect to the supervisor's socket " + path;
  for (;;) {
    if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0)
      return ok();
    if (errno == ENOENT || errno == ECONNREFUSED) {
      return Error{ErrorCode::kClosed,
                   what + ": " + std::strerror(errno) +
                       "; start this program with `dflash-moe llama -- PROGRAM`"};
    }
    if (errno != EAGAIN && errno != EINTR) return system_error(what);
    if (deadline.has_passed()) return Error{ErrorCode::kTimeout, what + ": it is busy"};
    // A listener whose queue is full cannot be polled for room in it.
    ::poll(nullptr, 0, static_cast<int>(kNapNs / 1'000'000));
  }
}

Status check_user(int fd) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0)
    return system_error("cannot ask who the supervisor is");
  if (peer.uid == ::geteuid() || peer.uid == 0) return ok();
  return Error{ErrorCode::kProtocol, "the supervisor runs as user " + std::to_string(peer.uid) +
                                         ", this process as " + std::to_string(::geteuid())};
}

// Takes the descriptors out of what recvmsg stored, all of them, so that none leaks.
size_t take_descriptors(msghdr& header, std::vector<OwnedFd>& descriptors) {
  size_t num_taken = 0;
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i, ++num_taken) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
      descriptors.emplace_back(fd);
    }
  }
  return num_taken;
}

Status check_count(const Received& received) {
  size_t announced = 0;
  if (const auto* offered = std::get_if<wire::PathOffered>(&received.message))
    announced = offered->num_descriptors;
  if (const auto* answered = std::get_if<wire::PathAnswered>(&received.message))
    announced = answered->num_descriptors;
  if (received.descriptors.size() == announced) return ok();
  return Error{ErrorCode::kProtocol,
               std::string("message ") + wire::handover_message_name(received.message) +
                   " announced " + std::to_string(announced) + " descriptors, " +
                   std::to_string(received.descriptors.size()) + " arrived"};
}

}  // namespace

Result<std::unique_ptr<Connection>> Connection::dial(const std::string& path, Deadline deadline) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return Error{ErrorCode::kInvalidArgument,
                 "the supervisor's socket path has " + std::to_string(path.size()) +
                     " bytes; allowed are 1.." + std::to_string(sizeof address.sun_path - 1)};
  }
  std::copy(path.begin(), path.end(), address.sun_path);
  OwnedFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.is_open()) return system_error("cannot make a socket for the supervisor");
  DFLASH_TRY(connect_to(socket.get(), address, path, deadline));
  DFLASH_TRY(check_user(socket.get()));
  return std::make_unique<Connection>(std::move(socket));
}

Status Connection::send(const wire::HandoverMessage& message, std::span<const int> descriptors,
                        Deadline deadline) {
  auto payload = wire::encode_handover(message);
  if (!payload.ok()) return std::move(payload).error();
  if (descriptors.size() > wire::kMaxHandoverDescriptors)
    return Error{ErrorCode::kProtocol, "too many descriptors for one message"};
  std::vector<std::byte> frame(wire::kControlLengthBytes + payload.value().size());
  wire::store_le<uint32_t>(static_cast<uint32_t>(payload.value().size()), frame, 0);
  std::copy(payload.value().begin(), payload.value().end(),
            frame.begin() + wire::kControlLengthBytes);
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kRoom * sizeof(int))> control{};
  const std::lock_guard lock(sending_);
  if (is_cut_) return hung_up();
  is_cut_ = true;  // until the frame is whole: what follows a part of one has no meaning
  for (size_t sent = 0; sent < frame.size();) {
    iovec piece{frame.data() + sent, frame.size() - sent};
    msghdr header{};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    if (sent == 0 && !descriptors.empty()) {
      header.msg_control = control.data();
      header.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
      cmsghdr* part = CMSG_FIRSTHDR(&header);
      part->cmsg_level = SOL_SOCKET;
      part->cmsg_type = SCM_RIGHTS;
      part->cmsg_len = CMSG_LEN(descriptors.size_bytes());
      std::memcpy(CMSG_DATA(part), descriptors.data(), descriptors.size_bytes());
    }
    const ssize_t taken = ::sendmsg(socket_.get(), &header, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (taken >= 0) {
      sent += static_cast<size_t>(taken);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      DFLASH_TRY(await(socket_.get(), POLLOUT, deadline));
    } else if (errno == EPIPE || errno == ECONNRESET) {
      return hung_up();
    } else if (errno != EINTR) {
      return system_error("cannot send to the supervisor");
    }
  }
  is_cut_ = false;
  return ok();
}

Status Connection::read(std::span<std::byte> into, Deadline deadline,
                        std::vector<OwnedFd>& descriptors) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kRoom * sizeof(int))> control;
  for (size_t at = 0; at < into.size();) {
    iovec piece{into.data() + at, into.size() - at};
    msghdr header{};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = CMSG_LEN(kRoom * sizeof(int));
    const ssize_t received = ::recvmsg(socket_.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (received < 0) {
      if (errno == EINTR) continue;
      if (errno == ECONNRESET) return hung_up();
      if (errno != EAGAIN && errno != EWOULDBLOCK)
        return system_error("cannot receive from the supervisor");
      DFLASH_TRY(await(socket_.get(), POLLIN, deadline));
      continue;
    }
    const size_t num_taken = take_descriptors(header, descriptors);
    if ((header.msg_flags & MSG_CTRUNC) != 0 && num_taken < kRoom)
      return system_error("cannot take descriptors of the supervisor", EMFILE);
    if (descriptors.size() > wire::kMaxHandoverDescriptors) {
      return Error{ErrorCode::kProtocol, "more than " +
                                             std::to_string(wire::kMaxHandoverDescriptors) +
                                             " descriptors arrived with one message"};
    }
    if (received == 0) return hung_up();
    at += static_cast<size_t>(received);
  }
  return ok();
}

Result<Received> Connection::receive(Deadline deadline) {
  Received received;
  std::array<std::byte, wire::kControlLengthBytes> length;
  DFLASH_TRY(read(std::span(length).first(1), deadline, received.descriptors));
  const Deadline rest = Deadline::after_ns(kFrameRestNs);
  DFLASH_TRY(read(std::span(length).subspan(1), rest, received.descriptors));
  const uint32_t num_bytes = wire::load_le<uint32_t>(length, 0);
  if (num_bytes == 0 || num_bytes > wire::kMaxControlFrameBytes) {
    return Error{ErrorCode::kProtocol, "frame: length " + std::to_string(num_bytes) +
                                           " is outside 1.." +
                                           std::to_string(wire::kMaxControlFrameBytes)};
  }
  std::vector<std::byte> payload(num_bytes);
  DFLASH_TRY(read(payload, rest, received.descriptors));
  auto message = wire::decode_handover(payload);
  if (!message.ok()) return std::move(message).error();
  received.message = std::move(message).value();
  DFLASH_TRY(check_count(received));
  return received;
}

bool Connection::is_hung_up() const {
  pollfd one{socket_.get(), POLLRDHUP, 0};
  return ::poll(&one, 1, 0) > 0 && (one.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

}  // namespace dflash::c_interface
