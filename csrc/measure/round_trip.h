// What `bench ipc` measures, in C++ so that no interpreter stands between two clock readings: round
// trips over a channel, the raw ping-pong of the same nature beside it, and plain memcpy.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "transport/channel.h"

namespace dflash::measure {

// Two pieces each way stay in a second-level cache of 1 MiB.
inline constexpr size_t kPieceBytes = 256 << 10;

struct RoundTripOptions {
  size_t payload_bytes = 0;  // each way
  uint32_t rounds = 0;       // samples returned
  uint32_t warmup = 0;       // rounds before them
  int64_t spin_ns = 0;
  int64_t timeout_ns = 0;  // of one wait
  int cpu = -1;            // pin the calling thread while measuring; -1: leave it
};

// One sample, in ns: copy `payload_bytes` out of private memory into request slots, publish, wait,
// copy the replies to private memory. A payload above kPieceBytes goes in pieces with as many in
// flight as the channel has slots, the way a call is sliced. The last round's bytes are compared.
// The worker's end has to run echo(). Errors: kTimeout, kInvalidArgument when a piece does not fit
// a slot, whatever the channel says.
Result<std::vector<int64_t>> round_trip(transport::Channel& host, const RoundTripOptions& options);

// The worker's end: copies each request into the reply slot and publishes it, until the peer closes
// or nothing came for `idle_timeout_ns`. Returns the number of messages answered.
Result<uint64_t> echo(transport::Channel& worker, int64_t spin_ns, int64_t idle_timeout_ns,
                      int cpu);

enum class FloorKind : uint8_t { kSpin, kFutex, kUnix, kTcp };
Result<FloorKind> parse_floor_kind(std::string_view name);  // "spin" "futex" "unix" "tcp"

struct FloorOptions {
  FloorKind kind = FloorKind::kSpin;
  size_t payload_bytes = 0;
  uint32_t rounds = 0;
  uint32_t warmup = 0;
  int host_cpu = -1;
  int worker_cpu = -1;
};
// Raw ping-pong between two threads, one copy per direction (sockets: one write and one read, each
// way). Samples in ns. Errors: kSystem, kTimeout after ten seconds without an answer.
Result<std::vector<int64_t>> floor_round_trip(const FloorOptions& options);

// Samples of bytes copied per second between two private buffers of this size.
Result<std::vector<double>> memcpy_bytes_per_s(size_t payload_bytes, uint32_t rounds, int cpu);

}  // namespace dflash::measure
