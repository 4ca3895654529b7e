// The bookkeeping of what is wrong with whom.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/world.h"

#include <utility>

#include "client/liveness.h"
#include "wire/frame.h"

namespace dflash::simulation {

constexpr size_t kMaxCallsWatched = 1024;  // far more than are under way at a time
// Beyond the time in which something must be found out.
constexpr int64_t kAllowanceNs = 1'000'000'000;
constexpr size_t kMaxViolations = 20;  // the first one matters; the others show its kind

World::World(uint64_t seed, const Options& drawn)
    : random(seed ^ 0x5eed5eed5eed5eed),
      options(drawn),
      hosts(drawn.hosts.size()),
      workers(drawn.workers.size()) {
  for (uint32_t host = 0; host < hosts.size(); ++host) {
    for (const SimulatedNetworkOptions& from : options.hosts[host].networks) {
      Network& network = hosts[host].workers.emplace_back().network;
      network.delay_ns = from.delay_ns;
      network.jitter_ns = from.jitter_ns;
      network.ns_per_byte = from.ns_per_byte;
    }
  }
  scheduler.on_spin = [this] { violate("somebody spins instead of sleeping"); };
}

World::~World() = default;

void World::violate(std::string what) {
  record(JournalEvent::kViolation);
  if (violations.empty()) events_before_violation = journal.last_events();
  if (violations.size() < kMaxViolations)
    violations.push_back("at " + std::to_string(scheduler.now_ns()) + " ns: " + std::move(what));
}

LinkContext World::link_context(uint32_t host, uint32_t worker) {
  HostRecord& record = hosts[host];
  return {scheduler,
          journal,
          random.split(),
          record.workers[worker].network,
          record.sent,
          record.workers[worker].replied_ns,
          label(host, worker),
          [this](std::string what) { violate(std::move(what)); },
          [this, &record](std::span<const std::byte> request) { check_attempt(record, request); }};
}

void World::check_attempt(HostRecord& host, std::span<const std::byte> request) {
  const auto header = wire::decode_frame_header(request.first<wire::kFrameHeaderBytes>());
  if (!header.ok()) return violate("the host sends a frame that is none");
  const wire::FrameHeader& frame = header.value();
  const auto first = host.closed_before.try_emplace(frame.call_id, host.sent.num_closed).first;
  const uint64_t most = options.holders[frame.shard].size() + host.sent.num_closed - first->second;
  if (frame.attempt > most)
    violate("attempt " + std::to_string(frame.attempt) + " of a slice of call " +
            std::to_string(frame.call_id) + ", which has fewer holders");
  if (host.closed_before.size() > kMaxCallsWatched)
    host.closed_before.erase(host.closed_before.begin());
}

// Of the time since the look before, a host that waits for replies sees a tick at least.
void World::look(uint32_t host) {
  HostRecord& record = hosts[host];
  const int64_t since_ns =
      scheduler.now_ns() - std::exchange(record.last_look_ns, scheduler.now_ns());
  for (std::string& late : record.expected_losses.check(std::min(since_ns, client::kTickNs)))
    violate(std::move(late));
}

// Predictions give a worker as much more time as its calls have, of which the longest counts here,
// twice: the client's own sum may have more in it.
void World::expect_loss_of_silent(uint32_t host, uint32_t worker, std::string why,
                                  std::function<bool()> is_over, std::function<bool()> counts) {
  HostRecord& record = hosts[host];
  const uint64_t num_losses = record.workers[worker].num_losses;
  record.expected_losses.add(
      {"worker " + std::to_string(label(host, worker)) + " " + std::move(why),
       [&record, worker, num_losses, is_over = std::move(is_over)] {
         return record.workers[worker].num_losses != num_losses || is_over();
       },
       std::move(counts), [&record] { return 2 * 2 * record.longest_limit_ns + kAllowanceNs; }});
}

void World::start_process(uint32_t worker) {
  if (options.workers[worker].is_started_by_host)
    hosts.front().workers[worker].network.is_mute = false;
  workers[worker].processes.push_back(std::make_unique<WorkerProcess>(*this, worker));
}

void World::begin_fault(uint32_t host, uint32_t worker, SimulatedFault kind, int64_t duration_ns) {
  ++num_faults[static_cast<size_t>(kind)];
  record(JournalEvent::kFault, label(host, worker), static_cast<uint64_t>(kind),
         static_cast<uint64_t>(duration_ns / 1'000'000));
  for (uint32_t other = 0; other < hosts.size(); ++other) {
    if (!concerns(kind, host, other)) continue;
    WorkerOfHost& struck = hosts[other].workers[worker];
    ++struck.num_faults;
    struck.healthy_since_ns = std::numeric_limits<int64_t>::max();
  }
}

void World::end_fault(uint32_t host, uint32_t worker, SimulatedFault kind) {
  record(JournalEvent::kHeal, label(host, worker), static_cast<uint64_t>(kind));
  const int64_t settled_ns = scheduler.now_ns() + kSettleNs * static_cast<int64_t>(hosts.size());
  for (uint32_t other = 0; other < hosts.size(); ++other) {
    if (!concerns(kind, host, other)) continue;
    WorkerOfHost& struck = hosts[other].workers[worker];
    if (--struck.num_faults == 0 && struck.is_attached) struck.healthy_since_ns = settled_ns;
  }
}

void World::set_attached(uint32_t host, uint32_t worker, bool is_attached) {
  WorkerOfHost& one = hosts[host].workers[worker];
  if (one.is_attached && !is_attached) ++one.num_losses;
  one.is_attached = is_attached;
  one.healthy_since_ns =
      is_attached && one.num_faults == 0 ? scheduler.now_ns() : std::numeric_limits<int64_t>::max();
}

}  // namespace dflash::simulation
