// Both ends of a channel in one process: the ring of the shared transport on private memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "transport/channel.h"

namespace dflash::transport {

struct ChannelPair {
  std::unique_ptr<Channel> host;
  std::unique_ptr<Channel> worker;
};
// The ends may live on two threads. Errors: kInvalidArgument, kOutOfMemory, kSystem.
Result<ChannelPair> make_loopback(const SlotGeometry& geometry);

// A loopback without a serving thread: whoever polls the host's end computes what was published.
// So a host's own experts run on the thread that waits for them, and nothing is handed over.

// Answers the oldest request of the worker's end, if there is one; returns whether there was.
// Errors end the data path.
using ServeOne = std::function<Result<bool>(Channel& worker)>;

// Returns the host's end, which owns the worker's. Where a request is unanswered, each poll() first
// calls `serve_one`, so that it takes as long as that computes. It is for callers who want the
// answer before anything else: with other peers, poll them first.
std::unique_ptr<Channel> make_served(ChannelPair ends, ServeOne serve_one);

}  // namespace dflash::transport
