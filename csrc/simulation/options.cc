// Drawing the options. Ranges are those of real installations, but the small end is as likely as
// the large one, since bugs live at few slots and short times.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/options.h"

#include <algorithm>
#include <cstdio>

namespace dflash::simulation {
namespace {

constexpr int64_t kUs = 1'000, kMs = 1'000'000, kS = 1'000'000'000;

SimulatedWorkerOptions draw_worker(Random& random) {
  SimulatedWorkerOptions worker;
  worker.is_stream = random.chance(0.5);
  worker.is_started_by_host = random.chance(0.7);
  worker.delay_ns = worker.is_stream ? random.magnitude(10 * kUs, 5 * kMs) : 2 * kUs;
  worker.jitter_ns = random.chance(0.5) ? worker.delay_ns : 0;
  worker.ns_per_byte = worker.is_stream ? 1 + 40 * random.unit() : 0.1;  // 0.2 to 8 Gbit/s
  worker.ns_per_pair = random.magnitude(5 * kUs, 500 * kUs);
  return worker;
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
  SimulatedWorkerOptions& host = options.workers.emplace_back();
  host.is_last_resort = true;
  host.ns_per_pair = random.magnitude(100 * kUs, 500 * kUs);
  for (auto& holders : options.holders) holders.push_back(index);
  options.joins_late = random.chance(0.5);
}

void draw_faults(Random& random, Options& options) {
  for (size_t kind = 0; kind < kNumSimulatedFaults; ++kind) {
    if (random.chance(0.4)) options.faults.push_back(static_cast<SimulatedFault>(kind));
  }
  if (options.faults.empty()) options.faults.push_back(SimulatedFault::kKill);
  options.fault_gap_ns = random.magnitude(kS / 2, 10 * kS);
  options.restart_ns = random.magnitude(50 * kMs, kS);
  options.load_ns = random.magnitude(5 * kMs, kS / 2);
  options.backoff_ns[0] = random.magnitude(20 * kMs, kS / 2);
  options.backoff_ns[1] = random.magnitude(kS / 2, 4 * kS);
  options.drain_ns = random.magnitude(10 * kMs, 5 * kS);
}

std::string seconds(const char* name, int64_t ns) {
  char text[80];
  std::snprintf(text, sizeof text, "%s %.6f s", name, static_cast<double>(ns) * 1e-9);
  return text;
}

std::string count(const char* name, uint64_t value) {
  return std::string(name).append(" ").append(std::to_string(value));
}

}  // namespace

Options Options::of(uint64_t seed, int64_t duration_ns) {
  Random random(seed);
  Options options;
  options.duration_ns = duration_ns;
  options.workers.resize(1 + random.below(4));
  for (SimulatedWorkerOptions& worker : options.workers) worker = draw_worker(random);
  draw_shards(random, options);
  if (random.chance(0.25)) add_last_resort(random, options);
  options.window = static_cast<uint32_t>(random.between(1, 3));
  options.num_slots = options.window + static_cast<uint32_t>(random.between(1, 2));
  options.slot_bytes = random.chance(0.5) ? 1024 : 8192;
  options.slice_tokens = static_cast<uint32_t>(random.magnitude(1, 64));
  options.call_timeout_ns = random.magnitude(kS / 2, 30 * kS);
  options.stall_timeout_ns = 2 * kS;
  options.max_tokens = static_cast<uint32_t>(random.magnitude(1, 32));
  options.top_k = static_cast<uint32_t>(random.between(1, std::min(4u, options.num_experts)));
  options.num_concurrent_calls = static_cast<uint32_t>(random.between(1, 4));
  options.think_ns = random.magnitude(3 * kMs, 100 * kMs);
  draw_faults(random, options);
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
    lines.push_back(count("worker", i) + kind + (workers[i].is_stream ? "a socket, " : "a ring, ") +
                    seconds("delay", workers[i].delay_ns) + ", " +
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
  lines.push_back(count("tokens of a call, at most", max_tokens) + ", " + count("top_k", top_k));
  lines.push_back(count("calls at a time", num_concurrent_calls));
  lines.push_back(seconds("mean time between two calls", think_ns));
  lines.push_back(seconds("mean time between two faults", fault_gap_ns));
  lines.push_back(seconds("starting a worker takes", restart_ns) + ", " +
                  seconds("loading", load_ns));
  lines.push_back(seconds("pauses between tries from", backoff_ns[0]) +
                  seconds(" to", backoff_ns[1]));
  lines.push_back(seconds("a removed worker may finish for", drain_ns));
  std::string kinds = "faults:";
  for (const SimulatedFault kind : faults) kinds.append(" ").append(fault_name(kind));
  lines.push_back(std::move(kinds));
  return lines;
}

}  // namespace dflash::simulation
