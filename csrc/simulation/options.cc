// Drawing the options. Ranges are those of real installations, but the small end is as likely as
// the large one, since bugs live at few slots and short times.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/options.h"

#include <algorithm>
#include <cstdio>

namespace dflash::simulation {
namespace {

constexpr int64_t kUs = 1'000, kMs = 1'000'000, kS = 1'000'000'000;
constexpr int64_t kMostTokens = 32;  // of a call

// Two hosts at once have half of a worker's time each, and turns may alternate where one of them is
// late to ask again: a piece of some 60 pairs of a shard of three experts then lies before each of
// as few as 8. Four calls of 128 pairs of half a millisecond, in pieces of 8, so wait for 64 such
// pieces at worst, two seconds. A flood of eight calls waits twice as long. This is what must not
// look like a failure.
constexpr int64_t kSharedCallTimeoutNs = 4 * kS;

void draw_network(Random& random, SimulatedNetworkOptions& network) {
  network.delay_ns = network.is_stream ? random.magnitude(10 * kUs, 5 * kMs) : 2 * kUs;
  network.jitter_ns = random.chance(0.5) ? network.delay_ns : 0;
  network.ns_per_byte = network.is_stream ? 1 + 40 * random.unit() : 0.1;  // 0.2 to 8 Gbit/s
}

void draw_worker(Random& random, SimulatedWorkerOptions& worker, SimulatedNetworkOptions& network) {
  network.is_stream = random.chance(0.5);
  worker.is_started_by_host = random.chance(0.7);
  draw_network(random, network);
  worker.ns_per_pair = random.magnitude(5 * kUs, 500 * kUs);
}

void draw_calls(Random& random, SimulatedHostOptions& host) {
  host.num_concurrent_calls = static_cast<uint32_t>(random.between(1, 4));
  host.think_ns = random.magnitude(3 * kMs, 100 * kMs);
}

// Each worker is the preferred holder of one or two shards; each shard has one to three experts,
// and one to three holders.
void draw_shards(Random& random, Options& options) {
  const auto num_holders = static_cast<uint32_t>(random.between(1, 3));
  for (uint32_t worker = 0; worker < options.workers.size(); ++worker) {
    for (int64_t count = random.between(1, 2); count > 0; --count) {
      options.shards.emplace_back();
      options.holders.push_back({worker});
      const auto num_workers = static_cast<uint32_t>(options.workers.size());
      for (uint32_t next = 1; next < std::min(num_workers, num_holders); ++next)
        options.holders.back().push_back((worker + next) % num_workers);
      for (int64_t expert = random.between(1, 3); expert > 0; --expert)
        options.shards.back().push_back(options.num_experts++);
    }
  }
}

// The host's own copy of all shards, slower than any worker.
void add_last_resort(Random& random, Options& options) {
  const auto index = static_cast<uint32_t>(options.workers.size());
  options.hosts.front().networks.emplace_back();
  SimulatedWorkerOptions& copy = options.workers.emplace_back();
  copy.is_last_resort = true;
  copy.ns_per_pair = random.magnitude(100 * kUs, 500 * kUs);
  for (auto& holders : options.holders) holders.push_back(index);
  options.joins_late = random.chance(0.5);
}

// Draws from the kinds in [first, last].
void draw_kinds(Random& random, SimulatedHostOptions& host, SimulatedFault first,
                SimulatedFault last) {
  for (auto kind = static_cast<size_t>(first); kind <= static_cast<size_t>(last); ++kind) {
    if (random.chance(0.4)) host.faults.push_back(static_cast<SimulatedFault>(kind));
  }
}

void draw_faults(Random& random, Options& options) {
  SimulatedHostOptions& host = options.hosts.front();
  draw_kinds(random, host, SimulatedFault::kKill, SimulatedFault::kStop);
  if (host.faults.empty()) host.faults.push_back(SimulatedFault::kKill);
  host.fault_gap_ns = random.magnitude(kS / 2, 10 * kS);
  options.restart_ns = random.magnitude(50 * kMs, kS);
  options.load_ns = random.magnitude(5 * kMs, kS / 2);
  options.backoff_ns[0] = random.magnitude(20 * kMs, kS / 2);
  options.backoff_ns[1] = random.magnitude(kS / 2, 4 * kS);
  options.drain_ns = random.magnitude(10 * kMs, 5 * kS);
}

// The hosts ask for more than the workers can compute, nearly all the time.
void make_eager(Random& random, Options& options) {
  for (SimulatedHostOptions& host : options.hosts) host.think_ns = random.magnitude(kMs, 20 * kMs);
  for (SimulatedWorkerOptions& worker : options.workers)
    worker.ns_per_pair = random.magnitude(100 * kUs, 500 * kUs);
}

// A second host at the same workers. A worker that a host has started serves that one alone, and so
// does a host's own copy, so that neither is in such a scene.
void add_second_host(Random& random, Options& options) {
  if (options.workers.back().is_last_resort) {
    options.workers.pop_back();
    options.hosts.front().networks.pop_back();
    for (auto& holders : options.holders) holders.pop_back();
    options.joins_late = false;
  }
  for (SimulatedWorkerOptions& worker : options.workers) worker.is_started_by_host = false;
  options.call_timeout_ns = std::max(options.call_timeout_ns, kSharedCallTimeoutNs);
  draw_kinds(random, options.hosts.front(), SimulatedFault::kFlood, SimulatedFault::kDie);
  SimulatedHostOptions host;
  for (size_t worker = 0; worker < options.workers.size(); ++worker) {
    host.networks.emplace_back().is_stream = random.chance(0.5);
    draw_network(random, host.networks.back());
  }
  host.max_tokens = static_cast<uint32_t>(random.magnitude(1, kMostTokens));
  draw_calls(random, host);
  draw_kinds(random, host, SimulatedFault::kMute, SimulatedFault::kDie);
  if (host.faults.empty()) host.faults.push_back(SimulatedFault::kFlood);
  host.fault_gap_ns = random.magnitude(kS / 2, 10 * kS);
  options.hosts.push_back(std::move(host));
  // Otherwise they seldom meet.
  if (random.chance(0.5)) make_eager(random, options);
}

std::string seconds(const char* name, int64_t ns) {
  char text[80];
  std::snprintf(text, sizeof text, "%s %.6f s", name, static_cast<double>(ns) * 1e-9);
  return text;
}

std::string count(const char* name, uint64_t value) {
  return std::string(name).append(" ").append(std::to_string(value));
}

std::string network_text(const SimulatedNetworkOptions& network) {
  return (network.is_stream ? "a socket, " : "a ring, ") + seconds("delay", network.delay_ns);
}

void add_call_lines(std::vector<std::string>& lines, const SimulatedHostOptions& host) {
  lines.push_back(count("calls at a time", host.num_concurrent_calls));
  lines.push_back(seconds("mean time between two calls", host.think_ns));
  lines.push_back(seconds("mean time between two faults", host.fault_gap_ns));
}

std::string fault_text(const SimulatedHostOptions& host) {
  std::string kinds = "faults:";
  for (const SimulatedFault kind : host.faults) kinds.append(" ").append(fault_name(kind));
  return kinds;
}

void add_second_host_lines(std::vector<std::string>& lines, const SimulatedHostOptions& host) {
  lines.push_back("a second host, whose workers and calls are those below with 10 and 10^9 added:");
  for (size_t i = 0; i < host.networks.size(); ++i)
    lines.push_back(count("  worker", i) + " by " + network_text(host.networks[i]));
  lines.push_back(count("  tokens of a call, at most", host.max_tokens));
  std::vector<std::string> calls;
  add_call_lines(calls, host);
  for (const std::string& line : calls) lines.push_back("  " + line);
  lines.push_back("  " + fault_text(host));
}

}  // namespace

Options Options::of(uint64_t seed, int64_t duration_ns) {
  Random random(seed);
  Options options;
  options.duration_ns = duration_ns;
  options.workers.resize(1 + random.below(4));
  SimulatedHostOptions& host = options.hosts.emplace_back();
  host.networks.resize(options.workers.size());
  for (size_t worker = 0; worker < options.workers.size(); ++worker)
    draw_worker(random, options.workers[worker], host.networks[worker]);
  draw_shards(random, options);
  if (random.chance(0.25)) add_last_resort(random, options);
  options.window = static_cast<uint32_t>(random.between(1, 3));
  options.num_slots = options.window + static_cast<uint32_t>(random.between(1, 2));
  options.slot_bytes = random.chance(0.5) ? 1024 : 8192;
  options.slice_tokens = static_cast<uint32_t>(random.magnitude(1, 64));
  options.call_timeout_ns = random.magnitude(kS / 2, 30 * kS);
  options.stall_timeout_ns = 2 * kS;
  host.max_tokens = static_cast<uint32_t>(random.magnitude(1, kMostTokens));
  options.top_k = static_cast<uint32_t>(random.between(1, std::min(4u, options.num_experts)));
  draw_calls(random, host);
  draw_faults(random, options);
  if (random.chance(0.5)) add_second_host(random, options);
  return options;
}

std::vector<std::string> Options::lines() const {
  std::vector<std::string> lines{seconds("time in which things break", duration_ns)};
  for (size_t i = 0; i < workers.size(); ++i) {
    const char* kind = workers[i].is_last_resort && joins_late
                           ? " (the host's own copy, made when it is needed), "
                       : workers[i].is_last_resort     ? " (the host's own copy), "
                       : workers[i].is_started_by_host ? ", started by the host, "
                                                       : ", dialled, ";
    lines.push_back(count("worker", i) + kind + network_text(hosts.front().networks[i]) + ", " +
                    seconds("a pair takes", workers[i].ns_per_pair));
  }
  for (size_t s = 0; s < shards.size(); ++s) {
    std::string line = count("shard", s) + ", " + count("experts", shards[s].size()) + ", held by";
    for (const uint32_t worker : holders[s]) line.append(" ").append(std::to_string(worker));
    lines.push_back(std::move(line));
  }
  lines.push_back(count("slots", num_slots) + ", " + count("bytes of each", slot_bytes));
  lines.push_back(count("tokens of a slice", slice_tokens) + ", " + count("window", window));
  lines.push_back(seconds("call_timeout", call_timeout_ns));
  lines.push_back(count("tokens of a call, at most", hosts.front().max_tokens) + ", " +
                  count("top_k", top_k));
  add_call_lines(lines, hosts.front());
  lines.push_back(seconds("starting a worker takes", restart_ns) + ", " +
                  seconds("loading", load_ns));
  lines.push_back(seconds("pauses between tries from", backoff_ns[0]) +
                  seconds(" to", backoff_ns[1]));
  lines.push_back(seconds("a removed worker may finish for", drain_ns));
  if (hosts.size() > 1) add_second_host_lines(lines, hosts.back());
  lines.push_back(fault_text(hosts.front()));
  return lines;
}

}  // namespace dflash::simulation
