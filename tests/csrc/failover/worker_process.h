// Worker processes, forked without exec: each serves the host's own weights, which it inherits,
// with the product's worker loop and pulse over a path of the product's handshake.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <memory>
#include <vector>

#include "client/types.h"
#include "failover/struck_channel.h"
#include "store/shard_store.h"
#include "transport/kinds.h"

namespace dflash::failover {

// The shape of every shard. A call of 256 tokens computes for milliseconds, and its requests are
// larger than what a socket takes at once.
inline constexpr uint32_t kWidth = 256, kIntermediate = 64;
inline constexpr uint32_t kExpertsEach = 8;  // of a shard; shard i has the ids from 8 i
inline constexpr uint32_t kLayer = 3;
inline constexpr uint64_t kFirstFingerprint = 900;  // of shard 0; the next ones count on

// Random weights of all shards, packed once: a worker's process inherits their pages.
class Weights {
 public:
  static Result<std::unique_ptr<Weights>> make(uint32_t num_shards);
  const std::shared_ptr<store::ResidentShard>& shard(uint32_t index) const {
    return shards_[index];
  }
  uint32_t num_shards() const { return static_cast<uint32_t>(shards_.size()); }

 private:
  explicit Weights(std::shared_ptr<compute::ExpertBackend> backend) : store_(std::move(backend)) {}
  store::ShardStore store_;
  std::vector<std::shared_ptr<store::ResidentShard>> shards_;
};

// Orders in pages that child processes share, one for each worker.
class SharedOrders {
 public:
  static Result<SharedOrders> make(uint32_t count);
  SharedOrders(SharedOrders&& other) noexcept
      : orders_(std::exchange(other.orders_, nullptr)), num_bytes_(other.num_bytes_) {}
  SharedOrders& operator=(SharedOrders&&) = delete;
  ~SharedOrders();
  Orders& operator[](uint32_t index) const { return orders_[index]; }

 private:
  SharedOrders(Orders* orders, size_t num_bytes) : orders_(orders), num_bytes_(num_bytes) {}
  Orders* orders_;
  size_t num_bytes_;
};

// A process that serves every shard, and the host's ends of its path and pulse.
struct Started {
  pid_t pid = 0;
  client::NewPath path;
  OwnedFd pulse;
};
// Forks. The caller has one thread. The process dies with its parent at the latest.
Result<Started> start_worker(const Weights& weights, const transport::TransportKind& kind,
                             const transport::SlotGeometry& geometry, uint64_t generation,
                             Orders& orders);

// The numbers of all descriptors that this process has open.
std::vector<int> open_descriptors();
// How many mappings of memfds this process has: segments that were not unmapped.
size_t num_segments();

}  // namespace dflash::failover
