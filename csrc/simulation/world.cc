// The bookkeeping of what is wrong with whom.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/world.h"

#include <utility>

#include "wire/frame.h"

namespace dflash::simulation {

constexpr size_t kMaxCallsWatched = 1024;  // far more than are under way at a time
constexpr size_t kMaxViolations = 20;      // the first one matters; the others show its kind

World::World(uint64_t seed, const Options& drawn)
    : random(seed ^ 0x5eed5eed5eed5eed), options(drawn), members(drawn.workers.size()) {
  for (uint32_t worker = 0; worker < members.size(); ++worker) {
    const WorkerOptions& from = options.workers[worker];
    Network& network = members[worker].network;
    network.delay_ns = from.delay_ns;
    network.jitter_ns = from.jitter_ns;
    network.ns_per_byte = from.ns_per_byte;
  }
  scheduler.on_spin = [this] { violate("somebody spins instead of sleeping"); };
}

World::~World() = default;

void World::violate(std::string what) {
  record(EventKind::kViolation);
  if (violations.empty()) events_before_violation = journal.last_events();
  if (violations.size() < kMaxViolations)
    violations.push_back("at " + std::to_string(scheduler.now_ns()) + " ns: " + std::move(what));
}

LinkContext World::link_context(uint32_t worker) {
  return {scheduler,
          journal,
          random.split(),
          members[worker].network,
          sent,
          worker,
          [this](std::string what) { violate(std::move(what)); },
          [this](std::span<const std::byte> request) { check_attempt(request); }};
}

void World::check_attempt(std::span<const std::byte> request) {
  const auto header = wire::decode_frame_header(request.first<wire::kFrameHeaderBytes>());
  if (!header.ok()) return violate("the host sends a frame that is none");
  const wire::FrameHeader& frame = header.value();
  const auto first = closed_before_.try_emplace(frame.call_id, sent.num_closed).first;
  const uint64_t most = options.holders[frame.shard].size() + sent.num_closed - first->second;
  if (frame.attempt > most)
    violate("attempt " + std::to_string(frame.attempt) + " of a slice of call " +
            std::to_string(frame.call_id) + ", which has fewer holders");
  if (closed_before_.size() > kMaxCallsWatched) closed_before_.erase(closed_before_.begin());
}

void World::start_process(uint32_t worker) {
  members[worker].processes.push_back(std::make_unique<WorkerProcess>(*this, worker));
}

void World::begin_fault(uint32_t worker, FaultKind kind, int64_t duration_ns) {
  ++num_faults[static_cast<size_t>(kind)];
  record(EventKind::kFault, worker, static_cast<uint64_t>(kind),
         static_cast<uint64_t>(duration_ns / 1'000'000));
  ++members[worker].num_faults;
  members[worker].healthy_since_ns = std::numeric_limits<int64_t>::max();
}

void World::end_fault(uint32_t worker, FaultKind kind) {
  record(EventKind::kHeal, worker, static_cast<uint64_t>(kind));
  Member& member = members[worker];
  if (--member.num_faults == 0 && member.is_attached)
    member.healthy_since_ns = scheduler.now_ns() + kSettleNs;
}

void World::set_attached(uint32_t worker, bool is_attached) {
  Member& member = members[worker];
  member.is_attached = is_attached;
  member.healthy_since_ns = is_attached && member.num_faults == 0
                                ? scheduler.now_ns()
                                : std::numeric_limits<int64_t>::max();
}

}  // namespace dflash::simulation
