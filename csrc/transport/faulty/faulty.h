// Decorators of the host's end of a channel: one makes it misbehave on purpose, for tests, the
// other makes it slow, to emulate links in benchmarks.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "transport/channel.h"

namespace dflash::transport {

// How slow a link is. The same seed gives the same jitter.
struct Emulation {
  double delay_ms = 0;   // added to every message, in each direction
  double jitter_ms = 0;  // uniform in [0, jitter_ms), in each direction; the order is kept
  double mbit_s = 0;     // rate of serialisation, for each direction on its own; 0 is unlimited
  uint64_t seed = 1;
};

enum class FaultKind : uint8_t { kNone, kFail, kDelay, kTruncate, kCorrupt, kDrop };
// Where faults are counted: messages that are published, or messages that poll() brings (not calls
// of poll()).
enum class FaultPoint : uint8_t { kPublish, kPoll };

// One planned fault.
struct Fault {
  FaultKind kind = FaultKind::kNone;
  FaultPoint point = FaultPoint::kPublish;
  uint64_t nth = 0;     // which operation at this point fails, from 1; 0 is none
  double delay_ms = 0;  // used by kDelay
  uint64_t seed = 1;    // picks the corrupted bit and the truncated length
};

// Changes replies on their way, as a worker that computes wrongly would: called with the bytes of
// every message that poll() brings, on the thread that polls.
using RewriteReply = std::function<void(std::span<std::byte>)>;

// All own the channel that they wrap, and have its threads and errors.
std::unique_ptr<Channel> make_emulated(std::unique_ptr<Channel> inner, const Emulation& emulation);
std::unique_ptr<Channel> make_faulty(std::unique_ptr<Channel> inner, const Fault& fault);
std::unique_ptr<Channel> make_rewritten(std::unique_ptr<Channel> inner, RewriteReply rewrite);

}  // namespace dflash::transport
