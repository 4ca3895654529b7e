// SPDX-License-Identifier: Apache-2.0
#include "client/worker_link.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace dflash::client {
namespace {

// One pulse: magic u32 "PULS", version u32, counter u64, little-endian (docs/protocol.md).
constexpr size_t kPulseBytes = 16;
// version 1 above the magic "PULS"
constexpr uint64_t kPulseHead = (uint64_t{1} << 32) | 0x534c5550u;

uint64_t little_endian_u64(const std::byte* bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < 8; ++i) value |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  return value;
}

}  // namespace

std::string seconds_text(int64_t nanoseconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(nanoseconds) / 1e9);
  return text;
}

WorkerEnd::WorkerEnd(WorkerLink taken) : link(std::move(taken)), window(link.policy.window) {
  slots.resize(link.channel->geometry().num_slots);
}

void WorkerEnd::replace_channel(std::unique_ptr<transport::Channel> channel, uint64_t generation) {
  link.channel = std::move(channel);
  link.generation = generation;
  slots.assign(link.channel->geometry().num_slots, Slot{});
  num_in_flight_ = 0;
  num_quarantined_ = 0;
  is_retired = false;
}

void WorkerEnd::close(std::string why) {
  is_lost = true;
  reason = std::move(why);
  waiting.clear();
  waiting_forecast_ns_ = 0;
  slots.clear();
  num_in_flight_ = 0;
  num_quarantined_ = 0;
  link.channel.reset();
  link.pulse.close();
}

std::optional<uint32_t> WorkerEnd::acquire() {
  if (num_in_flight_ >= window) return std::nullopt;
  for (uint32_t slot = 0; slot < slots.size(); ++slot) {
    if (slots[slot].is_free()) return slot;
  }
  return std::nullopt;
}

void WorkerEnd::enqueue(Part* part) {
  waiting.push_back(part);
  waiting_forecast_ns_ += part->forecast_ns;
}

Part* WorkerEnd::dequeue() {
  Part* part = waiting.front();
  waiting.pop_front();
  waiting_forecast_ns_ -= part->forecast_ns;
  return part;
}

void WorkerEnd::drop_waiting(const Call& call) {
  std::erase_if(waiting, [&](const Part* part) {
    if (part->call != &call) return false;
    waiting_forecast_ns_ -= part->forecast_ns;
    return true;
  });
}

void WorkerEnd::put_in_flight(uint32_t slot, Part* part, int64_t now) {
  if (num_in_flight_++ == 0) last_change_ns_ = now;
  slots[slot].part = part;
  last_layer = part->call->layer->plan.layer;
}

void WorkerEnd::release(uint32_t slot) {
  if (slots[slot].part != nullptr) --num_in_flight_;
  if (slots[slot].quarantine) --num_quarantined_;
  slots[slot] = Slot{};
}

void WorkerEnd::quarantine(uint32_t slot) {
  const Part& part = *slots[slot].part;
  const LayerPlan& plan = part.call->layer->plan;
  slots[slot].quarantine =
      Quarantine{part.call->id, plan.layer, plan.shards[part.shard_index].shard, part.slice};
  slots[slot].part = nullptr;
  --num_in_flight_;
  ++num_quarantined_;
}

std::optional<std::string> WorkerEnd::read_pulses(int64_t now) {
  std::optional<std::string> failure;
  while (link.pulse.is_open() && read_once(now, failure)) {
  }
  return failure;
}

bool WorkerEnd::is_stalled(int64_t now, int64_t stall_ns) const {
  return link.pulse.is_open() && (owes() || is_leased) && now - last_change_ns_ > stall_ns;
}

// Reads once; true when there may be more.
bool WorkerEnd::read_once(int64_t now, std::optional<std::string>& failure) {
  std::byte buffer[64 * kPulseBytes];
  const ssize_t received = ::recv(link.pulse.get(), buffer, sizeof buffer, MSG_DONTWAIT);
  if (received < 0) {
    if (errno == EINTR) return true;
    if (errno != EAGAIN && errno != EWOULDBLOCK)
      failure = std::string("its pulse connection failed: ") + std::strerror(errno);
    return false;
  }
  if (received == 0) {
    failure = "hung up";
    return false;
  }
  pulse_rest_.insert(pulse_rest_.end(), buffer, buffer + received);
  size_t at = 0;
  for (; pulse_rest_.size() - at >= kPulseBytes; at += kPulseBytes) {
    if (little_endian_u64(&pulse_rest_[at]) != kPulseHead) {
      failure = "sent bytes that are no pulse";
      return false;
    }
    const uint64_t counter = little_endian_u64(&pulse_rest_[at + 8]);
    if (counter != last_counter_) {
      last_counter_ = counter;
      last_change_ns_ = now;
    }
  }
  pulse_rest_.erase(pulse_rest_.begin(), pulse_rest_.begin() + static_cast<std::ptrdiff_t>(at));
  return static_cast<size_t>(received) == sizeof buffer;
}

}  // namespace dflash::client
