// The channel: memory of slots, receives that are posted ahead, sends that wait for their turn, and
// the connection that tells of the peer's end.
// SPDX-License-Identifier: Apache-2.0
#include "transport/fabric/fabric_channel.h"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "base/owned_fd.h"
#include "transport/ring/layout.h"
#include "transport/ring/mapping.h"

namespace dflash::transport {
namespace {

// Bounds one poll() against a peer, or strangers, that send without pause.
constexpr int kReadsPerPoll = 64;
constexpr size_t kCompletionsPerRead = 16;
// How often a thread that polls without sleeping looks at the companion, which takes a system call.
constexpr int64_t kLookEveryNs = 2'000'000;
// What the peer sent before it went may still be on its way when the companion has told of its end.
constexpr int64_t kLastMessagesNs = 20'000'000;
// How soon a sleeper looks again while a send was not taken, or has not left: no descriptor tells
// of either. Providers take none while they connect, which a first message waits for, and `net` of
// libfabric 1.17 wakes nobody when a full socket has room again.
constexpr int64_t kRetryNs = 100'000;
// The shortest time that libfabric waits for a completion.
constexpr int kSettleMs = 1;
// How long the end of a channel waits for its last sends to leave.
constexpr int64_t kLingerNs = 50'000'000;

std::atomic<uint64_t> num_strangers = 0;  // messages of this process, as num_fabric_strangers()

class FabricChannel final : public Channel {
 public:
  FabricChannel(Side side, const SlotGeometry& geometry, FabricEndpoint endpoint,
                StreamSocket companion, Mapping memory, OwnedFd sleeper)
      : geometry_(geometry),
        outgoing_bytes_(side == Side::kHost ? geometry.request_bytes : geometry.reply_bytes),
        incoming_bytes_(side == Side::kHost ? geometry.reply_bytes : geometry.request_bytes),
        memory_(std::move(memory)),
        sends_(num_fabric_sends(geometry)),
        receives_(num_fabric_receives(geometry)),
        held_(geometry.num_slots, nullptr),
        companion_(std::move(companion)),
        sleeper_(std::move(sleeper)),
        endpoint_(std::move(endpoint)) {
    std::byte* room = memory_.base() + geometry.num_slots * outgoing_bytes_;
    for (Receive& receive : receives_) {
      receive.room = {room, incoming_bytes_};
      room += incoming_bytes_;
    }
  }

  ~FabricChannel() override {
    const Deadline deadline = Deadline::after_ns(kLingerNs);
    while (!broken_ && gone_since_ns_ == 0 && (num_flying_ > 0 || !queue_.empty()) &&
           !deadline.has_passed()) {
      if (auto polled = poll(); !polled.ok()) break;
      nap_ns(kRetryNs / 2);
    }
  }

  // Has the endpoint know the memory, and posts all receives.
  Status open() {
    DFLASH_TRY(endpoint_.use_memory({memory_.base(), memory_.num_bytes()}));
    for (Receive& receive : receives_) DFLASH_TRY(post(receive));
    return ok();
  }

  const SlotGeometry& geometry() const override { return geometry_; }
  const char* kind() const override { return kFabricKind.name; }

  std::span<std::byte> outgoing(uint32_t slot) override {
    check(slot < geometry_.num_slots, "outgoing slot out of range");
    return {memory_.base() + slot * outgoing_bytes_, outgoing_bytes_};
  }

  Status publish(uint32_t slot, size_t bytes) override {
    if (slot >= geometry_.num_slots || bytes > outgoing_bytes_ || sends_[slot].is_queued) {
      return Error{ErrorCode::kInvalidArgument,
                   "fabric channel: publish of " + std::to_string(bytes) + " bytes in slot " +
                       std::to_string(slot) + "; there are " + std::to_string(geometry_.num_slots) +
                       " slots of " + std::to_string(outgoing_bytes_) +
                       " bytes, each under way at most once"};
    }
    if (broken_) return *broken_;
    Status handed = hand_over(slot, bytes);
    if (!handed.ok()) broken_ = handed.error();
    return handed;
  }

  Result<std::optional<Arrival>> poll() override {
    if (broken_) return *broken_;
    auto polled = advance();
    if (!polled.ok()) broken_ = polled.error();
    return polled;
  }

  WakeSource arm(SleepKind) override {
    must_look_ = true;  // the sleep may end because of the companion
    has_more_ = !arrived_.empty() || !endpoint_.may_sleep();
    // A descriptor that is readable although nothing has come would end every sleep at once.
    if (!has_more_ && !broken_ && is_signalled()) {
      if (Status settled = settle(); !settled.ok()) broken_ = settled.error();
      has_more_ = broken_.has_value() || !arrived_.empty() || !endpoint_.may_sleep();
    }
    WakeSource source;
    source.fd = sleeper_.get();
    source.events = POLLIN;
    // `may_sleep` has asked the provider for what a poll() after arm() would find.
    source.is_level_triggered = true;
    return source;
  }
  void disarm() override { has_more_ = false; }
  int64_t next_event_ns() const override {
    if (has_more_) return 0;
    if (gone_since_ns_ != 0) return gone_since_ns_ + kLastMessagesNs;
    const bool waits = !queue_.empty() || !unposted_.empty() || num_flying_ > 0;
    return waits ? now_ns() + kRetryNs : Channel::next_event_ns();
  }

 private:
  struct Send {
    fi_context2 context;
    size_t bytes = 0;
    bool is_queued = false;  // and not taken by the provider yet
    bool is_flying = false;  // taken, and its completion was not read yet
  };
  struct Receive {
    fi_context2 context;
    std::span<std::byte> room;
  };

  struct Arrived {
    uint32_t slot;
    size_t num_bytes;
    Receive* receive;
  };

  Status hand_over(uint32_t slot, size_t bytes) {
    // What came in this slot is answered, so that its memory takes a message again before the
    // peer's next one leaves.
    DFLASH_TRY(give_back(slot));
    sends_[slot].bytes = bytes;
    sends_[slot].is_queued = true;
    queue_.push_back(slot);
    DFLASH_TRY(send_queued());
    if (queue_.empty()) return ok();
    // Providers take so many sends until the completions of earlier ones are read.
    DFLASH_TRY(read_completions());
    return send_queued();
  }

  // Gives queued messages to the provider, in the order of publish(), until it takes no more.
  Status send_queued() {
    while (!queue_.empty()) {
      const uint32_t slot = queue_.front();
      Send& send = sends_[slot];
      // The peer has answered what went before in this slot, but this end has not read yet that it
      // left, and until then the context is the provider's.
      if (send.is_flying) return ok();
      const ssize_t returned =
          endpoint_.send(outgoing(slot).first(send.bytes), slot, &send.context);
      if (returned == -FI_EAGAIN) return ok();
      if (returned != 0) {
        Error failed = endpoint_.error("sending failed", returned);
        failed.code = ErrorCode::kWorkerLost;
        return failed;
      }
      send.is_queued = false;
      send.is_flying = true;
      ++num_flying_;
      queue_.erase(queue_.begin());
    }
    return ok();
  }

  // Lets the next message of any slot come into this memory.
  Status post(Receive& receive) {
    const ssize_t returned = endpoint_.receive(receive.room, &receive.context);
    if (returned == 0) return ok();
    if (returned != -FI_EAGAIN) return endpoint_.error("posting a receive failed", returned);
    unposted_.push_back(&receive);
    return ok();
  }
  Status post_unposted() {
    for (size_t left = unposted_.size(); left > 0; --left) {
      Receive& receive = *unposted_.front();
      unposted_.erase(unposted_.begin());
      DFLASH_TRY(post(receive));
    }
    return ok();
  }
  Status give_back(uint32_t slot) {
    Receive* const receive = std::exchange(held_[slot], nullptr);
    return receive == nullptr ? ok() : post(*receive);
  }

  // Whether the queue's descriptor is readable, although it was just found empty.
  bool is_signalled() const {
    pollfd awaited{endpoint_.wait_fd(), POLLIN, 0};
    return ::poll(&awaited, 1, 0) > 0;
  }
  // Takes away what makes it readable, and what comes meanwhile.
  Status settle() {
    std::array<fi_cq_data_entry, kCompletionsPerRead> completions;
    std::array<fi_addr_t, kCompletionsPerRead> sources;
    return take_read(endpoint_.await(completions, sources.data(), kSettleMs), completions, sources);
  }

  Result<std::optional<Arrival>> advance() {
    if (arrived_.empty()) DFLASH_TRY(read_completions());
    if (!queue_.empty()) DFLASH_TRY(send_queued());
    if (arrived_.empty()) {
      DFLASH_TRY(look_at_companion());
      return std::optional<Arrival>();
    }
    const Arrived next = arrived_.front();
    arrived_.pop_front();
    DFLASH_TRY(give_back(next.slot));
    held_[next.slot] = next.receive;
    return std::optional(Arrival{next.slot, next.receive->room.first(next.num_bytes)});
  }

  // Reads what has completed, until nothing has. It has the provider move bytes as well.
  Status read_completions() {
    for (int read = 0; read < kReadsPerPoll; ++read) {
      if (!unposted_.empty()) DFLASH_TRY(post_unposted());
      std::array<fi_cq_data_entry, kCompletionsPerRead> completions;
      std::array<fi_addr_t, kCompletionsPerRead> sources;
      const ssize_t got = endpoint_.read(completions, sources.data());
      if (got == -FI_EAGAIN) return ok();
      DFLASH_TRY(take_read(got, completions, sources));
    }
    return ok();
  }

  // Takes what a read returned: so many completions, or a negative error number.
  Status take_read(ssize_t got, std::span<const fi_cq_data_entry> completions,
                   std::span<const fi_addr_t> sources) {
    if (got == -FI_EAGAIN) return ok();
    if (got == -FI_EAVAIL) return take_failure();
    if (got < 0) return endpoint_.error("reading completions failed", got);
    for (size_t at = 0; at < static_cast<size_t>(got); ++at)
      DFLASH_TRY(take(completions[at], sources[at]));
    return ok();
  }

  // Takes one completion: of a send, which frees its context, or of a receive.
  Status take(const fi_cq_data_entry& completion, fi_addr_t source) {
    if (Send* const sent = find_send(completion.op_context); sent != nullptr) {
      sent->is_flying = false;
      --num_flying_;
      return ok();
    }
    Receive* const receive = find_receive(completion.op_context);
    if (receive == nullptr)
      return Error{ErrorCode::kProtocol, "fabric channel: a completion of no operation of its own"};
    // Anybody who reaches the endpoint can send to it. What is not the peer's is dropped.
    if (!endpoint_.is_peer(source)) {
      num_strangers.fetch_add(1, std::memory_order_relaxed);
      return post(*receive);
    }
    const bool has_slot = (completion.flags & FI_REMOTE_CQ_DATA) != 0;
    if (!has_slot || completion.data >= geometry_.num_slots || completion.len > incoming_bytes_) {
      return Error{ErrorCode::kProtocol,
                   "fabric channel: the peer sent " + std::to_string(completion.len) +
                       " bytes for " +
                       (has_slot ? "slot " + std::to_string(completion.data) : "no slot") +
                       "; there are " + std::to_string(geometry_.num_slots) + " slots of " +
                       std::to_string(incoming_bytes_) + " bytes"};
    }
    arrived_.push_back({static_cast<uint32_t>(completion.data), completion.len, receive});
    return ok();
  }

  // A receive that went wrong is posted again: it may have been a stranger's message, too long or
  // cut off, and libfabric does not say whose it was. Where it was the peer's, the caller's
  // deadlines end the call. A send is always to the peer.
  Status take_failure() {
    const FabricEndpoint::Failure failure = endpoint_.take_failure();
    if (Receive* const receive = find_receive(failure.context); receive != nullptr)
      return post(*receive);
    if (failure.context == nullptr) return ok();
    return Error{ErrorCode::kWorkerLost, "fabric channel (" + endpoint_.provider().name +
                                             "): sending failed: " + failure.text};
  }

  // Looks whether the peer is still there, where the queue has just been found empty.
  Status look_at_companion() {
    const int64_t now = now_ns();
    if (gone_since_ns_ != 0) {
      return now < gone_since_ns_ + kLastMessagesNs ? ok() : Status(*gone_);
    }
    if (!must_look_ && now < next_look_ns_) return ok();
    must_look_ = false;
    next_look_ns_ = now + kLookEveryNs;
    std::byte byte{};
    const iovec piece{&byte, 1};
    auto received = companion_.receive({&piece, 1});
    if (received.ok()) {
      if (received.value() == 0) return ok();
      return Error{ErrorCode::kProtocol,
                   "fabric channel: the peer sent bytes on the connection that carries none"};
    }
    gone_ = std::move(received).error().with("fabric channel");
    gone_since_ns_ = now;
    // It stays readable from now on, and would end every sleep.
    ::epoll_ctl(sleeper_.get(), EPOLL_CTL_DEL, companion_.fd(), nullptr);
    return ok();
  }

  template <class Operation>
  static Operation* find(std::vector<Operation>& operations, const void* context) {
    const auto* const first = reinterpret_cast<const std::byte*>(operations.data());
    const auto* const sought = static_cast<const std::byte*>(context);
    const ptrdiff_t at = sought - first;
    if (context == nullptr || at < 0) return nullptr;
    const size_t index = static_cast<size_t>(at) / sizeof(Operation);
    return index < operations.size() ? &operations[index] : nullptr;
  }
  Send* find_send(const void* context) { return find(sends_, context); }
  Receive* find_receive(const void* context) { return find(receives_, context); }

  SlotGeometry geometry_;
  uint64_t outgoing_bytes_, incoming_bytes_;
  Mapping memory_;               // the outgoing slots, then the rooms of receives
  std::vector<Send> sends_;      // by slot
  size_t num_flying_ = 0;        // of sends_
  std::vector<uint32_t> queue_;  // slots whose send is queued, oldest first; never more than slots
  std::vector<Receive> receives_;
  std::vector<Receive*> held_;      // by slot: what arrived there and may still be read
  std::vector<Receive*> unposted_;  // those that the provider did not take, oldest first
  std::deque<Arrived> arrived_;     // and not polled yet, oldest first; never more than receives
  StreamSocket companion_;
  OwnedFd sleeper_;  // an epoll of the queue's descriptor and the companion
  bool must_look_ = false;
  int64_t next_look_ns_ = 0;
  int64_t gone_since_ns_ = 0;  // when the companion told of the peer's end
  std::optional<Error> gone_;
  bool has_more_ = false;
  std::optional<Error> broken_;
  FabricEndpoint endpoint_;  // closed first: until then, contexts and memory are the provider's
};

Result<OwnedFd> make_sleeper(int queue_fd, int companion_fd) {
  OwnedFd sleeper(::epoll_create1(EPOLL_CLOEXEC));
  if (!sleeper.is_open()) return system_error("fabric channel: epoll_create1");
  for (const int awaited : {queue_fd, companion_fd}) {
    epoll_event event{};
    event.events = EPOLLIN;
    if (::epoll_ctl(sleeper.get(), EPOLL_CTL_ADD, awaited, &event) != 0)
      return system_error("fabric channel: epoll_ctl");
  }
  return sleeper;
}

}  // namespace

uint64_t num_fabric_strangers() { return num_strangers.load(std::memory_order_relaxed); }

uint64_t max_fabric_message(const SlotGeometry& geometry) {
  return std::max(geometry.request_bytes, geometry.reply_bytes);
}

Result<std::unique_ptr<Channel>> make_fabric_channel(Side side, const SlotGeometry& geometry,
                                                     FabricEndpoint endpoint,
                                                     StreamSocket companion) {
  DFLASH_TRY(check_geometry(geometry));
  const uint64_t incoming = side == Side::kHost ? geometry.reply_bytes : geometry.request_bytes;
  auto memory = Mapping::create(
      geometry.num_slots * (geometry.request_bytes + geometry.reply_bytes) + incoming);
  if (!memory.ok()) return std::move(memory).error();
  auto sleeper = make_sleeper(endpoint.wait_fd(), companion.fd());
  if (!sleeper.ok()) return std::move(sleeper).error();
  auto channel =
      std::make_unique<FabricChannel>(side, geometry, std::move(endpoint), std::move(companion),
                                      std::move(memory).value(), std::move(sleeper).value());
  DFLASH_TRY(channel->open());
  return std::unique_ptr<Channel>(std::move(channel));
}

}  // namespace dflash::transport
