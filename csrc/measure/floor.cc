// Floors: the least that a round trip of each nature costs on this machine, without slots, checks
// or framing.
// SPDX-License-Identifier: Apache-2.0
#include <linux/futex.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "base/owned_fd.h"
#include "measure/floor_pipe.h"
#include "measure/pinned.h"
#include "measure/round_trip.h"
#include "transport/ring/mapping.h"
#include "transport/stream/stream.h"

namespace dflash::measure {
namespace {

constexpr int64_t kTimeoutNs = 10'000'000'000;

Error system_error(const char* what) {
  return {ErrorCode::kSystem, std::string("floor: ") + what + ": " + std::strerror(errno)};
}
Error no_answer() { return {ErrorCode::kTimeout, "floor: no answer within ten seconds"}; }

// One direction of a ping-pong in shared memory: a counter on a line of its own, and one buffer.
struct SharedDirection {
  alignas(128) std::atomic<uint32_t> count = 0;
  alignas(128) std::byte* buffer = nullptr;
};

class SharedPipe final : public Pipe {
 public:
  SharedPipe(SharedDirection& out, SharedDirection& in, size_t payload_bytes, bool sleeps)
      : out_(out), in_(in), payload_bytes_(payload_bytes), sleeps_(sleeps) {}

  Status send(std::span<const std::byte> payload) override {
    std::memcpy(out_.buffer, payload.data(), payload.size());
    out_.count.store(++sent_, std::memory_order_release);  // publishes the buffer
    if (sleeps_) ::syscall(SYS_futex, &out_.count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    return ok();
  }

  Result<std::span<const std::byte>> receive(std::span<std::byte>) override {
    const uint32_t seen = received_++;
    for (int64_t turn = 1, start_ns = 0; in_.count.load(std::memory_order_acquire) == seen;
         ++turn) {
      if (sleeps_) {
        const timespec second{1, 0};
        ::syscall(SYS_futex, &in_.count, FUTEX_WAIT, seen, &second, nullptr, 0);
        // This is reached after ten seconds of time-outs, or after as many empty wake-ups.
        if (turn > 100'000) return no_answer();
      } else if (turn % 65536 == 0) {
        if (start_ns == 0) start_ns = now_ns();
        if (now_ns() - start_ns > kTimeoutNs) return no_answer();
      }
    }
    return std::span<const std::byte>(in_.buffer, payload_bytes_);
  }

 private:
  SharedDirection& out_;
  SharedDirection& in_;
  size_t payload_bytes_;
  bool sleeps_;
  uint32_t sent_ = 0, received_ = 0;
};

class SocketPipe final : public Pipe {
 public:
  SocketPipe(int socket, SocketHabit habit) : socket_(socket), habit_(habit) {}

  Status send(std::span<const std::byte> payload) override {
    // Prefix and payload leave in one write, as a channel's do.
    iovec pieces[] = {
        {prefix_.data(),                         habit_ == SocketHabit::kTwoReads ? prefix_.size() : 0},
        {const_cast<std::byte*>(payload.data()), payload.size()                                       }
    };
    for (size_t left = pieces[0].iov_len + payload.size(); left > 0;) {
      msghdr message{};
      message.msg_iov = pieces;
      message.msg_iovlen = 2;
      const ssize_t taken = ::sendmsg(socket_, &message, MSG_NOSIGNAL);
      if (taken < 0) return system_error("send");
      left -= static_cast<size_t>(taken);
      size_t sent = static_cast<size_t>(taken);
      for (iovec& piece : pieces) {
        const size_t of_piece = std::min(sent, piece.iov_len);
        piece.iov_base = static_cast<std::byte*>(piece.iov_base) + of_piece;
        piece.iov_len -= of_piece;
        sent -= of_piece;
      }
    }
    return ok();
  }

  Result<std::span<const std::byte>> receive(std::span<std::byte> private_memory) override {
    if (habit_ == SocketHabit::kTwoReads) DFLASH_TRY(fill(prefix_));
    DFLASH_TRY(fill(private_memory));
    return std::span<const std::byte>(private_memory);
  }

 private:
  Status fill(std::span<std::byte> rest) {
    const bool polls = habit_ == SocketHabit::kPolls;
    while (!rest.empty()) {
      const ssize_t got = ::recv(socket_, rest.data(), rest.size(), polls ? MSG_DONTWAIT : 0);
      if (got > 0) {
        rest = rest.subspan(static_cast<size_t>(got));
        continue;
      }
      if (got == 0) return Error{ErrorCode::kWorkerLost, "floor: the other end closed"};
      if (errno != EAGAIN) return system_error("recv");
      pollfd readable{socket_, POLLIN, 0};
      if (!polls || ::poll(&readable, 1, kTimeoutNs / 1'000'000) <= 0) return no_answer();
    }
    return ok();
  }

  int socket_;
  SocketHabit habit_;
  std::array<std::byte, 16> prefix_{};
};

Status set_timeouts(int socket) {
  const timeval timeout{kTimeoutNs / 1'000'000'000, 0};
  if (::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout) != 0 ||
      ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout) != 0) {
    return system_error("socket time-out");
  }
  return ok();
}

struct SocketPair {
  OwnedFd host, worker;
};

Result<SocketPair> unix_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    return system_error("socketpair");
  return SocketPair{OwnedFd(ends[0]), OwnedFd(ends[1])};
}

Result<SocketPair> tcp_without_delay() {
  auto made = transport::tcp_pair();
  if (!made.ok()) return std::move(made).error();
  SocketPair pair{std::move(made.value().first), std::move(made.value().second)};
  for (const int socket : {pair.host.get(), pair.worker.get()}) {
    const int on = 1;
    if (::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0)
      return system_error("TCP_NODELAY");
  }
  return pair;
}

Status answer(Pipe& worker, uint64_t rounds, size_t payload_bytes, int cpu) {
  Pinned pinned;
  DFLASH_TRY(pinned.to(cpu));
  std::vector<std::byte> private_memory(payload_bytes);
  for (uint64_t round = 0; round < rounds; ++round) {
    const auto payload = worker.receive(private_memory);
    if (!payload.ok()) return payload.error();
    DFLASH_TRY(worker.send(payload.value()));
  }
  return ok();
}

Result<std::vector<int64_t>> measure(Pipe& host, const FloorOptions& options) {
  Pinned pinned;
  DFLASH_TRY(pinned.to(options.host_cpu));
  std::vector<std::byte> sent(options.payload_bytes, std::byte{1}), got(options.payload_bytes);
  std::vector<int64_t> samples;
  samples.reserve(options.rounds);
  for (uint32_t round = 0; round < options.warmup + options.rounds; ++round) {
    const int64_t start_ns = now_ns();
    DFLASH_TRY(host.send(sent));
    if (const auto payload = host.receive(got); !payload.ok()) return payload.error();
    if (round >= options.warmup) samples.push_back(now_ns() - start_ns);
  }
  return samples;
}

Result<std::vector<int64_t>> ping_pong(Pipe& host, Pipe& worker, const FloorOptions& options) {
  Status answered = ok();
  std::thread thread([&] {
    answered = answer(worker, uint64_t{options.warmup} + options.rounds, options.payload_bytes,
                      options.worker_cpu);
  });
  auto samples = measure(host, options);
  thread.join();  // it ends by its own deadline even if measuring has failed
  if (samples.ok() && !answered.ok()) return std::move(answered).error();
  return samples;
}

Result<std::vector<int64_t>> shared_ping_pong(const FloorOptions& options) {
  auto request_memory = transport::Mapping::create(options.payload_bytes + 1);
  if (!request_memory.ok()) return std::move(request_memory).error();
  auto reply_memory = transport::Mapping::create(options.payload_bytes + 1);
  if (!reply_memory.ok()) return std::move(reply_memory).error();
  SharedDirection request, reply;
  request.buffer = request_memory.value().base();
  reply.buffer = reply_memory.value().base();
  const bool sleeps = options.kind == FloorKind::kFutex;
  SharedPipe host(request, reply, options.payload_bytes, sleeps);
  SharedPipe worker(reply, request, options.payload_bytes, sleeps);
  return ping_pong(host, worker, options);
}

}  // namespace

Result<FloorKind> parse_floor_kind(std::string_view name) {
  if (name == "spin") return FloorKind::kSpin;
  if (name == "futex") return FloorKind::kFutex;
  if (name == "unix") return FloorKind::kUnix;
  if (name == "tcp") return FloorKind::kTcp;
  if (name == "tls") return FloorKind::kTls;
  if (name == "fabric") return FloorKind::kFabric;
  return Error{ErrorCode::kInvalidArgument, "floor kind '" + std::string(name) +
                                                "' is none of spin, futex, unix, tcp, tls, fabric"};
}

Result<SocketHabit> parse_socket_habit(std::string_view name) {
  if (name == "bare") return SocketHabit::kBare;
  if (name == "two reads") return SocketHabit::kTwoReads;
  if (name == "polls") return SocketHabit::kPolls;
  return Error{ErrorCode::kInvalidArgument,
               "a socket's habit '" + std::string(name) + "' is none of bare, two reads, polls"};
}

Result<std::vector<int64_t>> floor_round_trip(const FloorOptions& options) {
  if (options.kind == FloorKind::kSpin || options.kind == FloorKind::kFutex)
    return shared_ping_pong(options);
  if (options.kind == FloorKind::kFabric) {
    auto pipes = make_fabric_pipes(options.payload_bytes);
    if (!pipes.ok()) return std::move(pipes).error();
    return ping_pong(*pipes.value().host, *pipes.value().worker, options);
  }
  auto sockets = options.kind == FloorKind::kUnix ? unix_pair() : tcp_without_delay();
  if (!sockets.ok()) return std::move(sockets).error();
  DFLASH_TRY(set_timeouts(sockets.value().host.get()));
  DFLASH_TRY(set_timeouts(sockets.value().worker.get()));
  const int host_socket = sockets.value().host.get();
  const int worker_socket = sockets.value().worker.get();
  if (options.kind == FloorKind::kTls) {
    auto host = make_tls_pipe(host_socket, /*is_dialling=*/true);
    if (!host.ok()) return std::move(host).error();
    auto worker = make_tls_pipe(worker_socket, /*is_dialling=*/false);
    if (!worker.ok()) return std::move(worker).error();
    return ping_pong(*host.value(), *worker.value(), options);
  }
  SocketPipe host(host_socket, options.habit);
  SocketPipe worker(worker_socket, options.habit);
  return ping_pong(host, worker, options);
}

}  // namespace dflash::measure
