// What `bench ipc` measures: round trips over a channel, the raw ping-pong of the same nature
// beside it, and plain memcpy. It is C++ so that no interpreter stands between two readings of the
// clock.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "transport/channel.h"

namespace dflash::measure {

// Payloads travel in pieces of this size, so that two pieces each way stay in a second-level cache
// of 1 MiB.
inline constexpr size_t kPieceBytes = 256 << 10;

struct RoundTripOptions {
  size_t payload_bytes = 0;  // in each direction
  uint32_t rounds = 0;       // how many samples are returned
  uint32_t warmup = 0;       // rounds before the first sample
  int64_t spin_ns = 0;
  int64_t timeout_ns = 0;  // of a single wait
  int cpu = -1;  // where the calling thread is pinned while it measures; -1 leaves it alone
};

// Measures round trips; the samples are nanoseconds. In each, `payload_bytes` are copied out of
// private memory into request slots and published, and the replies are awaited and copied to
// private memory. A payload above kPieceBytes goes in pieces, with as many in flight as the channel
// has slots, as a call does in slices. The bytes of the last round are compared. The worker's end
// has to run echo() meanwhile. Errors: kTimeout, kInvalidArgument where a piece does not
// fit a slot, and those of the channel.
Result<std::vector<int64_t>> round_trip(transport::Channel& host, const RoundTripOptions& options);

// The worker's end: copies each request into the reply's slot and publishes it, until the peer
// closes or nothing has come for `idle_timeout_ns`. Returns the number of messages answered.
Result<uint64_t> echo(transport::Channel& worker, int64_t spin_ns, int64_t idle_timeout_ns,
                      int cpu);

// What a socket's ping-pong does beyond one write and one blocking read, to tell what that costs.
enum class SocketHabit : uint8_t {
  kBare,
  kTwoReads,  // a prefix of 16 bytes is sent along, and has a read of its own
  kPolls,     // tries a read, sleeps in poll where nothing has come, and reads again
};
Result<SocketHabit> parse_socket_habit(std::string_view name);  // "bare", "two reads" or "polls"

enum class FloorKind : uint8_t { kSpin, kFutex, kUnix, kTcp, kTls, kFabric };
Result<FloorKind> parse_floor_kind(
    std::string_view name);  // "spin", "futex", "unix", "tcp", "tls" or "fabric"

struct FloorOptions {
  FloorKind kind = FloorKind::kSpin;
  size_t payload_bytes = 0;
  uint32_t rounds = 0;
  uint32_t warmup = 0;
  int host_cpu = -1;
  int worker_cpu = -1;
  SocketHabit habit = SocketHabit::kBare;  // of unix and tcp
};
// A raw ping-pong between two threads with one copy per direction (for sockets, one write and one
// read). Samples are in nanoseconds. Errors: kSystem, kTimeout after ten seconds without an answer.
Result<std::vector<int64_t>> floor_round_trip(const FloorOptions& options);

// Bytes copied per second between two private buffers of this size, one sample per round.
Result<std::vector<double>> memcpy_bytes_per_s(size_t payload_bytes, uint32_t rounds, int cpu);

}  // namespace dflash::measure
