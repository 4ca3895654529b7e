// Decorator that makes a channel misbehave on purpose (tests) or slow (emulated links in benches).
// It wraps the host's end.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "transport/channel.h"

namespace dflash::transport {

// Deterministic for a given seed.
struct Emulation {
  double delay_ms = 0;   // added one way, each way
  double jitter_ms = 0;  // uniform in [0, jitter_ms), each way, order preserved
  double mbit_s = 0;     // serialisation at this rate, each way on its own; 0 = unlimited
  uint64_t seed = 1;
};

enum class FaultKind : uint8_t { kNone, kFail, kDelay, kTruncate, kCorrupt, kDrop };
enum class FaultPoint : uint8_t { kPublish, kPoll };  // poll counts messages that arrive, not calls

struct Fault {
  FaultKind kind = FaultKind::kNone;
  FaultPoint point = FaultPoint::kPublish;
  uint64_t nth = 0;     // 1 = the first operation at this point
  double delay_ms = 0;  // for kDelay
  uint64_t seed = 1;    // picks the corrupted bit, the truncated length
};

std::unique_ptr<Channel> make_emulated(std::unique_ptr<Channel> inner, const Emulation& emulation);
std::unique_ptr<Channel> make_faulty(std::unique_ptr<Channel> inner, const Fault& fault);

}  // namespace dflash::transport
