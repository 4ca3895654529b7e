// Sends slices: whose turn it is, and how a slice becomes a request in a slot. Header, index part
// and rows are written straight into the slot; rows are converted and checksummed in one pass.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <vector>

#include "client/calls.h"

namespace dflash::client {

// A worker whose channel takes no more messages, and why. Whoever hears of it gives the worker up.
struct BrokenLink {
  Link* link = nullptr;
  Error error;
};

// A request is in flight in a free slot or not at all: one that cannot be encoded ends its call,
// and one that cannot be published is in flight at a worker that is about to be given up.
class Sending {
 public:
  Sending(const Crew& crew, Calls& calls, LateWatch& late_watch)
      : crew_(crew), calls_(calls), late_watch_(late_watch) {}

  // Sends what waits, as credits allow. It ends early where a link is broken, and is to be called
  // again once that one was given up.
  std::optional<BrokenLink> pump();
  // Sends one slice in a free slot, beside another holder's request if `is_hedge`. An error means
  // that the link is broken.
  Status send(Link& link, Slice& slice, uint32_t slot, bool is_hedge);

 private:
  const Crew& crew_;
  Calls& calls_;
  LateWatch& late_watch_;
  std::vector<Link*> order_;  // used again by each pump()
};

}  // namespace dflash::client
