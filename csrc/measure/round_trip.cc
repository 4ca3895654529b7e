// Round trips over a channel, their echo, and memcpy.
// SPDX-License-Identifier: Apache-2.0
#include "measure/round_trip.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "measure/pinned.h"

namespace dflash::measure {
namespace {

constexpr int64_t kMemcpySampleNs = 20'000;  // far longer than the clock's resolution

// The way of one payload there and back.
class RoundTrip {
 public:
  RoundTrip(transport::Channel& channel, const RoundTripOptions& options)
      : channel_(channel),
        options_(options),
        sent_(options.payload_bytes),
        got_(options.payload_bytes) {
    for (size_t i = 0; i < sent_.size(); ++i) sent_[i] = static_cast<std::byte>(i * 7 + (i >> 8));
    entry_.channel = &channel;
  }

  size_t num_pieces() const {
    return std::max<size_t>(1, (sent_.size() + kPieceBytes - 1) / kPieceBytes);
  }
  size_t piece_bytes(size_t piece) const {
    return std::min(kPieceBytes, sent_.size() - piece * kPieceBytes);
  }

  Status run() {
    const uint32_t num_slots = channel_.geometry().num_slots;
    size_t sent = 0;
    for (size_t received = 0; received < num_pieces(); ++received) {
      for (; sent < num_pieces() && sent - received < num_slots; ++sent)
        DFLASH_TRY(send(sent, num_slots));
      DFLASH_TRY(receive(received, num_slots));
    }
    return ok();
  }

  bool is_intact() const { return got_ == sent_; }

 private:
  Status send(size_t piece, uint32_t num_slots) {
    const uint32_t slot = static_cast<uint32_t>(piece % num_slots);
    const size_t bytes = piece_bytes(piece);
    std::memcpy(channel_.outgoing(slot).data(), sent_.data() + piece * kPieceBytes, bytes);
    return channel_.publish(slot, bytes);
  }

  // Pieces are echoed in the order in which they were sent, so that the slot is known.
  Status receive(size_t piece, uint32_t num_slots) {
    entry_.arrival.reset();
    transport::wait_any({&entry_, 1}, Deadline::after_ns(options_.timeout_ns), options_.spin_ns);
    if (entry_.error) return *entry_.error;
    if (!entry_.arrival) {
      return Error{ErrorCode::kTimeout,
                   std::string(channel_.kind()) + " round trip: no echo within " +
                       std::to_string(options_.timeout_ns / 1'000'000) + " ms"};
    }
    const std::span<const std::byte> bytes = entry_.arrival->bytes;
    if (entry_.arrival->slot != piece % num_slots || bytes.size() != piece_bytes(piece)) {
      return Error{ErrorCode::kProtocol, "round trip: the echo of piece " + std::to_string(piece) +
                                             " has " + std::to_string(bytes.size()) +
                                             " bytes in slot " +
                                             std::to_string(entry_.arrival->slot)};
    }
    std::memcpy(got_.data() + piece * kPieceBytes, bytes.data(), bytes.size());
    return ok();
  }

  transport::Channel& channel_;
  RoundTripOptions options_;
  std::vector<std::byte> sent_, got_;
  transport::WaitEntry entry_;
};

}  // namespace

Result<std::vector<int64_t>> round_trip(transport::Channel& host, const RoundTripOptions& options) {
  const transport::SlotGeometry& geometry = host.geometry();
  if (std::min(options.payload_bytes, kPieceBytes) >
      std::min(geometry.request_bytes, geometry.reply_bytes)) {
    return Error{ErrorCode::kInvalidArgument,
                 "round trip: " + std::to_string(options.payload_bytes) +
                     " bytes do not fit slots of " + std::to_string(geometry.request_bytes) +
                     " and " + std::to_string(geometry.reply_bytes)};
  }
  Pinned pinned;
  DFLASH_TRY(pinned.to(options.cpu));
  RoundTrip trip(host, options);
  std::vector<int64_t> samples;
  samples.reserve(options.rounds);
  for (uint32_t round = 0; round < options.warmup + options.rounds; ++round) {
    const int64_t start_ns = now_ns();
    DFLASH_TRY(trip.run());
    if (round >= options.warmup) samples.push_back(now_ns() - start_ns);
  }
  if (options.rounds > 0 && !trip.is_intact()) {
    return Error{ErrorCode::kProtocol,
                 std::string(host.kind()) + " round trip: the echo differs from what was sent"};
  }
  return samples;
}

Result<uint64_t> echo(transport::Channel& worker, int64_t spin_ns, int64_t idle_timeout_ns,
                      int cpu) {
  Pinned pinned;
  DFLASH_TRY(pinned.to(cpu));
  transport::WaitEntry entry;
  entry.channel = &worker;
  for (uint64_t num_answered = 0;; ++num_answered) {
    entry.arrival.reset();
    transport::wait_any({&entry, 1}, Deadline::after_ns(idle_timeout_ns), spin_ns);
    if (entry.error && entry.error->code != ErrorCode::kWorkerLost) return *entry.error;
    if (!entry.arrival) return num_answered;  // the peer closed, or has nothing more to say
    const transport::Arrival arrival = *entry.arrival;
    if (arrival.bytes.size() > worker.geometry().reply_bytes) {
      return Error{ErrorCode::kInvalidArgument, "echo: a request of " +
                                                    std::to_string(arrival.bytes.size()) +
                                                    " bytes does not fit a reply slot"};
    }
    if (!arrival.bytes.empty()) {
      std::memcpy(worker.outgoing(arrival.slot).data(), arrival.bytes.data(), arrival.bytes.size());
    }
    auto published = worker.publish(arrival.slot, arrival.bytes.size());
    if (!published.ok() && published.error().code == ErrorCode::kWorkerLost) return num_answered;
    if (!published.ok()) return std::move(published).error();
  }
}

Result<std::vector<double>> memcpy_bytes_per_s(size_t payload_bytes, uint32_t rounds, int cpu) {
  Pinned pinned;
  DFLASH_TRY(pinned.to(cpu));
  std::vector<std::byte> source(payload_bytes, std::byte{1}), destination(payload_bytes);
  // The pointer escapes through the asm, so that the compiler cannot drop a copy which nobody
  // reads.
  const auto copy = [&] {
    std::memcpy(destination.data(), source.data(), payload_bytes);
    asm volatile("" : : "r"(destination.data()) : "memory");
  };
  const int64_t probe_ns = now_ns();
  for (int i = 0; i < 4; ++i) copy();
  const int64_t one_ns = std::max<int64_t>(1, (now_ns() - probe_ns) / 4);
  const int64_t copies = std::max<int64_t>(1, kMemcpySampleNs / one_ns);
  std::vector<double> samples;
  samples.reserve(rounds);
  for (uint32_t round = 0; round < rounds; ++round) {
    const int64_t start_ns = now_ns();
    for (int64_t i = 0; i < copies; ++i) copy();
    const int64_t elapsed_ns = std::max<int64_t>(1, now_ns() - start_ns);
    samples.push_back(static_cast<double>(payload_bytes) * static_cast<double>(copies) * 1e9 /
                      static_cast<double>(elapsed_ns));
  }
  return samples;
}

}  // namespace dflash::measure
