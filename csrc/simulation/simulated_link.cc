// The way of a message: published by one end, on its way as an event, handed to the real channel
// when it is due, maybe damaged.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/simulated_link.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "base/checksum.h"
#include "transport/loopback/loopback.h"
#include "transport/stream/stream.h"
#include "wire/frame.h"
#include "wire/little_endian.h"
#include "wire/payload.h"

namespace dflash::simulation {

using transport::Arrival;
using transport::Side;

// What the product holds: a channel like any other.
class LinkEnd final : public transport::Channel {
 public:
  LinkEnd(std::shared_ptr<SimulatedLink> link, Side side) : link_(std::move(link)), side_(side) {}
  ~LinkEnd() override { link_->close(side_); }
  LinkEnd(const LinkEnd&) = delete;
  LinkEnd& operator=(const LinkEnd&) = delete;

  const transport::SlotGeometry& geometry() const override {
    return link_->at(side_).channel->geometry();
  }
  const char* kind() const override { return link_->at(side_).channel->kind(); }
  std::span<std::byte> outgoing(uint32_t slot) override {
    return link_->at(side_).channel->outgoing(slot);
  }
  Status publish(uint32_t slot, size_t bytes) override {
    return link_->publish(side_, slot, bytes);
  }
  Result<std::optional<Arrival>> poll() override { return link_->poll(side_); }
  transport::WakeSource arm(transport::SleepKind) override { return {}; }
  void disarm() override {}

 private:
  const std::shared_ptr<SimulatedLink> link_;
  const Side side_;
};

namespace {

Result<transport::ChannelPair> make_stream_pair(const transport::SlotGeometry& geometry,
                                                OwnedFd& worker_copy) {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0)
    return system_error("cannot make a pair of sockets");
  OwnedFd host_end(fds[0]), worker_end(fds[1]);
  auto copy = OwnedFd::duplicate(worker_end.get());
  if (!copy.ok()) return std::move(copy).error();
  worker_copy = std::move(copy).value();
  auto host = transport::make_stream_channel(Side::kHost, geometry, std::move(host_end), {});
  if (!host.ok()) return std::move(host).error();
  auto worker = transport::make_stream_channel(Side::kWorker, geometry, std::move(worker_end), {});
  if (!worker.ok()) return std::move(worker).error();
  return transport::ChannelPair{std::move(host).value(), std::move(worker).value()};
}

using Header = std::span<std::byte, wire::kFrameHeaderBytes>;

bool flip_bit(std::span<std::byte> message, Random& random) {
  const uint64_t bit = random.below(8 * message.size());
  message[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  return bit / 8 < wire::kFrameHeaderBytes;
}

void lie_about_times(std::span<std::byte> payload, Random& random) {
  wire::encode_reply_timing(
      {static_cast<int64_t>(random.next()), static_cast<int64_t>(random.next()),
       static_cast<int64_t>(random.next())},
      payload.first<wire::kReplyTimingBytes>());
}

// Damages a message in place, so that what is left is as hard to tell from a good one as can be:
// headers keep a checksum that matches. What is no frame (a test may send anything) gets a flipped
// bit. Returns whether whoever receives the message must refuse it, whatever the slot's state. A
// bit that flips in the payload need not be seen in a reply which nobody waits for any more.
bool damage(std::span<std::byte> message, SimulatedFault kind, Random& random) {
  if (kind == SimulatedFault::kFlipBit || message.size() < wire::kFrameHeaderBytes)
    return flip_bit(message, random);
  const Header bytes = message.first<wire::kFrameHeaderBytes>();
  auto decoded = wire::decode_frame_header(bytes);
  if (!decoded.ok()) return flip_bit(message, random);
  wire::FrameHeader& header = decoded.value();
  bool must_be_refused = true;
  if (kind == SimulatedFault::kStaleGeneration) {
    --header.generation;
  } else if (kind == SimulatedFault::kOtherAttempt) {
    header.attempt = static_cast<uint16_t>(header.attempt + 1);
  } else if (kind == SimulatedFault::kLyingTimes && header.kind == wire::FrameKind::kReply) {
    const auto payload = message.subspan(wire::kFrameHeaderBytes);
    lie_about_times(payload, random);
    header.payload_checksum = checksum(payload);
    must_be_refused = false;
  } else {
    return flip_bit(message, random);
  }
  wire::encode_frame_header(header, bytes);
  return must_be_refused;
}

// The first bytes of a message as it travels on a socket (transport/stream), with so many of its
// own bytes.
std::vector<std::byte> begun_stream_message(uint32_t slot, std::span<const std::byte> message,
                                            size_t num_bytes) {
  constexpr size_t kPrefixBytes = 16;  // slot u32, zero u32, bytes u64 (transport/stream/stream.h)
  std::vector<std::byte> begun(kPrefixBytes + num_bytes);
  wire::store_le<uint32_t>(slot, begun, 0);
  wire::store_le<uint64_t>(message.size(), begun, 8);
  std::ranges::copy(message.first(num_bytes), begun.begin() + kPrefixBytes);
  return begun;
}

}  // namespace

Result<std::shared_ptr<SimulatedLink>> SimulatedLink::create(
    LinkContext context, const transport::SlotGeometry& geometry, uint64_t generation,
    bool is_stream) {
  std::shared_ptr<SimulatedLink> link(new SimulatedLink(std::move(context), generation));
  auto pair = is_stream ? make_stream_pair(geometry, link->at(Side::kWorker).socket)
                        : transport::make_loopback(geometry);
  if (!pair.ok()) return std::move(pair).error();
  link->at(Side::kHost).channel = std::move(pair.value().host);
  link->at(Side::kWorker).channel = std::move(pair.value().worker);
  link->is_asked_.resize(geometry.num_slots);
  return link;
}

std::unique_ptr<transport::Channel> SimulatedLink::end(Side side) {
  return std::make_unique<LinkEnd>(shared_from_this(), side);
}

Status SimulatedLink::publish(Side side, uint32_t slot, size_t bytes) {
  End& sender = at(side);
  if (sender.is_killed) return ok();
  if (slot >= is_asked_.size() || bytes > sender.channel->outgoing(slot).size())
    return sender.channel->publish(slot, bytes);  // which refuses it
  context_.journal.record(context_.scheduler.now_ns(), JournalEvent::kPublish, context_.worker,
                          slot, bytes);
  if (side == Side::kHost) {
    if (is_asked_[slot])
      context_.violate("slot " + std::to_string(slot) + " of worker " +
                       std::to_string(context_.worker) +
                       " was used again before its reply came or its segment was gone");
    if (must_be_given_up_)
      context_.violate("the host went on with worker " + std::to_string(context_.worker) +
                       " after a message that it must refuse");
    is_asked_[slot] = true;
    context_.watch_request(sender.channel->outgoing(slot).first(bytes));
    ++context_.counts.num_requests;
    context_.counts.request_bytes += bytes;
  }
  context_.scheduler.at(due_ns(side, bytes), [self = shared_from_this(), side, slot, bytes] {
    self->deliver(side, slot, bytes);
  });
  return ok();
}

// A link keeps the order of its messages, as rings and streams do.
int64_t SimulatedLink::due_ns(Side side, size_t bytes) {
  const Network& network = context_.network;
  const int64_t jitter =
      static_cast<int64_t>(context_.random.unit() * static_cast<double>(network.jitter_ns));
  int64_t& last = at(side).last_due_ns;
  last = std::max(last, context_.scheduler.now_ns()) +
         static_cast<int64_t>(network.ns_per_byte * static_cast<double>(bytes));
  return std::max(last,
                  context_.scheduler.now_ns() + network.delay_ns + network.added_delay_ns + jitter);
}

void SimulatedLink::deliver(Side side, uint32_t slot, size_t bytes) {
  End& sender = at(side);
  const int64_t now = context_.scheduler.now_ns();
  const int64_t passes = context_.network.passes_at(side, now);
  if (passes > now) {
    context_.scheduler.at(passes, [self = shared_from_this(), side, slot, bytes] {
      self->deliver(side, slot, bytes);
    });
    return;
  }
  if (sender.channel == nullptr || sender.loses_sent) return;
  if (side == Side::kWorker && context_.network.is_mute) sender.is_stuck = true;
  if (sender.is_stuck) return;
  if (side == Side::kWorker) context_.replied_ns = now;
  context_.journal.record(now, JournalEvent::kDeliver, context_.worker, slot, bytes);
  if (sender.damage) {
    const SimulatedFault kind = *std::exchange(sender.damage, std::nullopt);
    context_.journal.record(now, JournalEvent::kDamage, context_.worker, slot,
                            static_cast<uint64_t>(kind));
    send_damaged(side, slot, bytes, kind);
  } else {
    send(side, slot, bytes);
  }
  if (Task* listener = at(other(side)).listener) listener->wake();
}

// A peer that has closed its end meanwhile is noticed by poll().
void SimulatedLink::send(Side side, uint32_t slot, size_t bytes, bool must_be_refused) {
  const bool is_sent = at(side).channel->publish(slot, bytes).ok();
  at(other(side)).may_have_come = true;
  if (is_sent && side == Side::kWorker) must_refuse_.push_back(must_be_refused);
}

void SimulatedLink::send_damaged(Side side, uint32_t slot, size_t bytes, SimulatedFault kind) {
  transport::Channel& channel = *at(side).channel;
  Random& random = context_.random;
  if (kind == SimulatedFault::kDuplicate) {
    send(side, slot, bytes);
    return send(side, slot, bytes);
  }
  if (kind == SimulatedFault::kStuck) {
    at(side).is_stuck = true;
    return at(side).socket.is_open() ? send_begun(side, slot, bytes) : void();
  }
  if (kind == SimulatedFault::kHalf && at(side).socket.is_open())
    return send_half(side, slot, bytes);
  if (kind == SimulatedFault::kTruncate || kind == SimulatedFault::kHalf)
    return send(side, slot, random.below(bytes), true);
  // Not towards a worker: it may be reading the other slot already, whose bytes are proven. And in
  // a ring not where the worker's own reply may lie, or come before the host has looked: there the
  // host may see that one, which it must take.
  const auto to = static_cast<uint32_t>((slot + 1) % is_asked_.size());
  const bool may_be_overwritten = !at(side).socket.is_open() && is_asked_[to];
  if (kind == SimulatedFault::kOtherSlot && side == Side::kWorker && !may_be_overwritten) {
    std::ranges::copy(channel.outgoing(slot).first(bytes), channel.outgoing(to).begin());
    return send(side, to, bytes, true);
  }
  send(side, slot, bytes, damage(channel.outgoing(slot).first(bytes), kind, random));
}

// The beginning of a message on the socket.
void SimulatedLink::send_begun(Side side, uint32_t slot, size_t bytes) {
  End& sender = at(side);
  const std::vector<std::byte> begun = begun_stream_message(
      slot, sender.channel->outgoing(slot).first(bytes), context_.random.below(bytes));
  static_cast<void>(
      ::send(sender.socket.get(), begun.data(), begun.size(), MSG_DONTWAIT | MSG_NOSIGNAL));
  at(other(side)).may_have_come = true;
}

// And then its end: what a process leaves behind that dies while it sends.
void SimulatedLink::send_half(Side side, uint32_t slot, size_t bytes) {
  send_begun(side, slot, bytes);
  ::shutdown(at(side).socket.get(), SHUT_RDWR);
  at(side).may_have_come = at(other(side)).may_have_come = true;
}

Result<std::optional<Arrival>> SimulatedLink::poll(Side side) {
  End& receiver = at(side);
  if (receiver.is_killed) return Error{ErrorCode::kClosed, "the process was killed"};
  if (side == Side::kHost && must_be_given_up_)
    context_.violate("the host listens to worker " + std::to_string(context_.worker) +
                     " after a message that it must refuse");
  if (!receiver.may_have_come) return std::optional<Arrival>();
  auto polled = receiver.channel->poll();
  if (polled.ok() && !polled.value()) receiver.may_have_come = false;
  if (side == Side::kHost && polled.ok() && polled.value()) {
    const uint32_t slot = polled.value()->slot;
    is_asked_[slot] = false;
    must_be_given_up_ = must_refuse_.front();
    must_refuse_.pop_front();
  }
  return polled;
}

// What was sent before is still on its way; then the other end hears of it.
void SimulatedLink::close(Side side) {
  at(side).is_closed = true;
  context_.counts.num_closed += side == Side::kHost ? 1 : 0;
  at(side).listener = nullptr;
  const int64_t due = due_ns(side, 0);
  context_.scheduler.at(due, [self = shared_from_this(), side] { self->hang_up(side); });
}

void SimulatedLink::hang_up(Side side) {
  const int64_t now = context_.scheduler.now_ns();
  const int64_t passes = context_.network.passes_at(side, now);
  if (passes > now) {
    context_.scheduler.at(passes, [self = shared_from_this(), side] { self->hang_up(side); });
    return;
  }
  End& end = at(side);
  if (!end.is_killed || end.socket.is_open()) end.channel.reset();
  end.socket.close();
  at(other(side)).may_have_come = true;
  if (Task* listener = at(other(side)).listener) listener->wake();
}

void SimulatedLink::kill_worker(bool keeps_sent) {
  End& worker = at(Side::kWorker);
  worker.is_killed = true;
  worker.loses_sent = !keeps_sent;
  worker.listener = nullptr;
}

}  // namespace dflash::simulation
