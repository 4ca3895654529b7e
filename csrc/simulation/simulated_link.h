// A data path with a network in it. Both ends are real channels of the product, joined in this
// process; between them messages take time, wait for a network that is cut, and get damaged. Links
// also watch the rules of slots, which no part of the client is asked about.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/owned_fd.h"
#include "simulation/faults.h"
#include "simulation/journal.h"
#include "simulation/random.h"
#include "simulation/scheduler.h"
#include "transport/channel.h"

namespace dflash::simulation {

// What lies between host and one worker, whatever paths come and go: how long things take, and
// until when nothing passes.
struct Network {
  int64_t delay_ns = 0;   // of every message
  int64_t jitter_ns = 0;  // at most so much more, drawn for each message
  double ns_per_byte = 0;
  int64_t added_delay_ns = 0;
  std::array<int64_t, 2> cut_until_ns{};  // by the side that sends
  bool is_mute = false;                   // answers do not come

  int64_t passes_at(transport::Side from, int64_t when_ns) const {
    return std::max(when_ns, cut_until_ns[static_cast<size_t>(from)]);
  }
};

// What was published on links, for the balance at the end.
struct LinkCounts {
  uint64_t num_requests = 0, request_bytes = 0;
  uint64_t num_closed = 0;  // paths that the host has closed
};

// What a link knows of the world around it.
struct LinkContext {
  Scheduler& scheduler;
  Journal& journal;
  Random random;
  const Network& network;
  LinkCounts& counts;
  int64_t& replied_ns;  // when something of the worker last came
  uint32_t worker;
  std::function<void(std::string)> violate;
  std::function<void(std::span<const std::byte>)> watch_request;  // before it is on its way
};

// Shared by its two ends and by messages on their way.
class SimulatedLink : public std::enable_shared_from_this<SimulatedLink> {
 public:
  // `is_stream` joins them by a Unix socket, otherwise by a ring in memory.
  static Result<std::shared_ptr<SimulatedLink>> create(LinkContext context,
                                                       const transport::SlotGeometry& geometry,
                                                       uint64_t generation, bool is_stream);

  // The host's or the worker's end, once each; whoever destroys it closes it for the other end.
  std::unique_ptr<transport::Channel> end(transport::Side side);
  // The task to wake when a message comes to this side.
  void set_listener(transport::Side side, Task* task) { at(side).listener = task; }
  bool has_listener(transport::Side side) { return at(side).listener != nullptr; }
  // The next message that this side sends meets this fault.
  void damage_next(transport::Side side, SimulatedFault kind) { at(side).damage = kind; }
  void spare_next(transport::Side side) { at(side).damage.reset(); }
  // The worker was killed. What it does from here on has no effect, and a ring's other end learns
  // nothing of it. `keeps_sent` says whether messages on their way still come, as from a kernel's
  // buffers, or do not, as from a machine that lost its power.
  void kill_worker(bool keeps_sent);
  bool is_closed(transport::Side side) const { return ends_[static_cast<size_t>(side)].is_closed; }
  // Whether a request was published and not answered yet.
  bool owes() const { return std::ranges::count(is_asked_, true) > 0; }
  // Whether messages of a side do not come any more, as once one was swallowed.
  bool is_stuck(transport::Side side) const { return ends_[static_cast<size_t>(side)].is_stuck; }
  uint64_t generation() const { return generation_; }

 private:
  friend class LinkEnd;
  struct End {
    std::unique_ptr<transport::Channel> channel;  // null once closed
    Task* listener = nullptr;
    std::optional<SimulatedFault> damage;
    int64_t last_due_ns = 0;  // when its newest message will be at the other end
    bool is_killed = false, is_closed = false;
    bool loses_sent = false;    // messages on their way do not come
    bool is_stuck = false;      // none that it sends comes any more
    bool may_have_come = true;  // whether polling can find anything; else the kernel is not asked
    OwnedFd socket;             // of a stream: its own, to break it off in the middle of a message
  };
  SimulatedLink(LinkContext context, uint64_t generation)
      : context_(std::move(context)), generation_(generation) {}
  static transport::Side other(transport::Side side) {
    return side == transport::Side::kHost ? transport::Side::kWorker : transport::Side::kHost;
  }
  End& at(transport::Side side) { return ends_[static_cast<size_t>(side)]; }

  Status publish(transport::Side side, uint32_t slot, size_t bytes);
  Result<std::optional<transport::Arrival>> poll(transport::Side side);
  void close(transport::Side side);
  void hang_up(transport::Side side);
  int64_t due_ns(transport::Side side, size_t bytes);
  void deliver(transport::Side side, uint32_t slot, size_t bytes);
  void send(transport::Side side, uint32_t slot, size_t bytes, bool must_be_refused = false);
  void send_damaged(transport::Side side, uint32_t slot, size_t bytes, SimulatedFault kind);
  void send_begun(transport::Side side, uint32_t slot, size_t bytes);
  void send_half(transport::Side side, uint32_t slot, size_t bytes);

  LinkContext context_;
  const uint64_t generation_;
  std::array<End, 2> ends_;
  std::vector<bool> is_asked_;     // by slot: a request was published there and not yet answered
  std::deque<bool> must_refuse_;   // by message that the host has not polled yet, oldest first
  bool must_be_given_up_ = false;  // the host has taken a message that it must refuse
};

}  // namespace dflash::simulation
