// A signal is raised on the serving thread, so that it takes effect before the next line: SIGKILL
// ends the process there, and SIGSTOP halts it until somebody sends SIGCONT.
// SPDX-License-Identifier: Apache-2.0
#include "failover/struck_channel.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>

#include <algorithm>
#include <vector>

namespace dflash::failover {
namespace {

constexpr size_t kPrefixBytes = 16;  // slot u64, bytes u64, little-endian (stream/send_queue.h)
// A stopped worker that goes on finds a host that reads; anything longer is a host that is gone.
constexpr int64_t kMostSendingMs = 10'000;

class StruckChannel final : public transport::Channel {
 public:
  StruckChannel(std::unique_ptr<transport::Channel> inner, Orders& orders, OwnedFd socket)
      : inner_(std::move(inner)), orders_(orders), socket_(std::move(socket)) {}

  const transport::SlotGeometry& geometry() const override { return inner_->geometry(); }
  const char* kind() const override { return inner_->kind(); }
  std::span<std::byte> outgoing(uint32_t slot) override { return inner_->outgoing(slot); }
  transport::WakeSource arm(transport::SleepKind kind) override { return inner_->arm(kind); }
  void disarm() override { inner_->disarm(); }
  int64_t next_event_ns() const override { return inner_->next_event_ns(); }

  Result<std::optional<transport::Arrival>> poll() override {
    if (is_ordered(Moment::kOnItsWay) && has_bytes()) strike();
    if (is_ordered(Moment::kUnread) && has_replied_ && !has_unsent()) strike();
    if (is_ordered(Moment::kComputing) && num_taken_ > 0) {
      if (orders_.looks.load(std::memory_order_relaxed) == 0) strike();
      orders_.looks.fetch_sub(1, std::memory_order_relaxed);
    }
    auto polled = inner_->poll();
    if (polled.ok() && polled.value()) {
      if (is_ordered(Moment::kOnItsWay)) strike();  // a ring shows its messages by poll() alone
      ++num_taken_;
      has_replied_ = false;
    }
    return polled;
  }

  Status publish(uint32_t slot, size_t bytes) override {
    if (is_ordered(Moment::kComputing)) strike();  // it computed faster than it looked
    if (num_taken_ > 0) --num_taken_;
    has_replied_ = true;
    if (is_ordered(Moment::kHalfWritten)) {
      if (!socket_.is_open()) return publish_in_halves(slot, bytes);
      if (!has_unsent()) return send_in_halves(slot, bytes);
    }
    DFLASH_TRY(inner_->publish(slot, bytes));
    if (is_ordered(Moment::kUnread) && !has_unsent()) strike();
    return ok();
  }

 private:
  bool is_ordered(Moment moment) const {
    return orders_.moment.load(std::memory_order_acquire) == static_cast<uint32_t>(moment);
  }
  void strike() {
    orders_.withdraw();
    orders_.num_obeyed.fetch_add(1, std::memory_order_release);
    ::raise(orders_.signal.load(std::memory_order_relaxed));
  }
  bool has_bytes() const {
    std::byte one;
    return socket_.is_open() && ::recv(socket_.get(), &one, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
  }
  // Whether the socket has not taken all that was published.
  bool has_unsent() {
    if (!socket_.is_open()) return false;
    const bool has = (inner_->arm(transport::SleepKind::kPoll).events & POLLOUT) != 0;
    inner_->disarm();
    return has;
  }

  // The second half of the slot holds garbage while the worker is struck, as it does while its
  // rows are still to be computed.
  Status publish_in_halves(uint32_t slot, size_t bytes) {
    const std::span<std::byte> rest = inner_->outgoing(slot).first(bytes).subspan(bytes / 2);
    const std::vector<std::byte> kept(rest.begin(), rest.end());
    std::ranges::fill(rest, std::byte{0xa5});
    strike();
    std::ranges::copy(kept, rest.begin());
    return inner_->publish(slot, bytes);
  }

  Status send_in_halves(uint32_t slot, size_t bytes) {
    const std::span<const std::byte> reply = inner_->outgoing(slot).first(bytes);
    std::vector<std::byte> message(kPrefixBytes);
    const uint64_t fields[2] = {slot, bytes};
    for (size_t i = 0; i < kPrefixBytes; ++i)
      message[i] = static_cast<std::byte>(fields[i / 8] >> (8 * (i % 8)));
    message.insert(message.end(), reply.begin(), reply.end());
    const size_t num_sent = send_some(std::span(message).first(message.size() / 2));
    strike();
    std::span<const std::byte> rest = std::span<const std::byte>(message).subspan(num_sent);
    const Deadline deadline = Deadline::after_ms(kMostSendingMs);
    while (!rest.empty()) {
      if (deadline.has_passed()) return Error{ErrorCode::kWorkerLost, "the host does not read"};
      pollfd awaited{socket_.get(), POLLOUT, 0};
      ::poll(&awaited, 1, 10);
      if ((awaited.revents & (POLLERR | POLLHUP)) != 0)
        return Error{ErrorCode::kWorkerLost, "the host hung up"};
      rest = rest.subspan(send_some(rest));
    }
    return ok();
  }
  size_t send_some(std::span<const std::byte> bytes) const {
    const ssize_t sent =
        ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    return sent > 0 ? static_cast<size_t>(sent) : 0;
  }

  const std::unique_ptr<transport::Channel> inner_;
  Orders& orders_;
  const OwnedFd socket_;
  uint32_t num_taken_ = 0;    // requests that were taken and not answered
  bool has_replied_ = false;  // since the last request was taken
};

}  // namespace

const char* moment_name(Moment moment) {
  switch (moment) {
    case Moment::kIdle:        return "idle";
    case Moment::kOnItsWay:    return "on its way";
    case Moment::kComputing:   return "computing";
    case Moment::kHalfWritten: return "half written";
    case Moment::kUnread:      return "unread";
    case Moment::kAnyTime:     return "any time";
  }
  return "unknown";
}

std::unique_ptr<transport::Channel> make_struck(std::unique_ptr<transport::Channel> inner,
                                                Orders& orders, OwnedFd socket) {
  return std::make_unique<StruckChannel>(std::move(inner), orders, std::move(socket));
}

}  // namespace dflash::failover
