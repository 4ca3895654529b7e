// A client and its puppets (client/puppet.h) in virtual time: a test says when the host computes,
// when it is stopped, and how each worker behaves, and nothing depends on the machine's speed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "client/call.h"
#include "client/puppet.h"
#include "simulation/scheduler.h"

namespace dflash::simulation {

inline constexpr int64_t kMs = 1'000'000, kS = 1'000'000'000;

class VirtualScene {
 public:
  // How a worker behaves from now on.
  struct Worker {
    bool is_stopped = false;  // as by SIGSTOP
    bool is_mute = false;     // it takes requests and shows progress, and no answer comes
    int64_t answer_ns = kMs;  // from a request to its answer, one after the other
    bool is_pulsing = true;
    int num_requests = 0;
    std::deque<client::Message> asked;  // not answered yet
    int64_t begun_ns = 0;               // when it began with the first of them
  };

  explicit VirtualScene(client::SceneOptions options) : scene(with_pulses(options)) {
    workers.resize(scene.puppets.size());
  }
  ~VirtualScene() { scheduler.drop_events(); }

  // Runs `body` as the host's thread.
  void run(std::function<void()> body) {
    const auto task = scheduler.spawn(std::move(body));
    host_ = task.get();
    act();
    scheduler.run([&task] { return task->is_over(); });
    host_ = nullptr;
  }

  // -- in `body` --
  int64_t now() const { return scheduler.now_ns(); }
  // The host's thread does something else.
  void compute(int64_t ns) { scheduler.running()->sleep_until(now() + ns); }
  // The host's process will be stopped in `delay_ns`, for `ns`; so will all workers where they have
  // its terminal.
  void stop_host(int64_t delay_ns, int64_t ns, bool stops_workers) {
    const auto set = [this, stops_workers](bool is_stopped) {
      for (Worker& worker : workers) worker.is_stopped = stops_workers && is_stopped;
    };
    scheduler.after(delay_ns, [this, set] {
      host_->freeze();
      set(true);
    });
    scheduler.after(delay_ns + ns, [this, set] {
      set(false);
      host_->thaw();
    });
  }
  // Waits for the end of a call, at most for `limit_ns`. Calls `look` every 10 ms meanwhile, as the
  // thread that keeps workers would look.
  bool wait(
      const client::CallPtr& call, int64_t limit_ns = 600 * kS,
      const std::function<void()>& look = [] {}) {
    const int64_t until = now() + limit_ns;
    while (now() < until) {
      if (scene.client.wait(call, Deadline::at_ns(std::min(until, now() + 10 * kMs)))) return true;
      look();
    }
    return false;
  }
  // Makes a call for the worker's own shard. Returns how it ended, and how long it took.
  std::pair<Status, int64_t> call(uint32_t worker) {
    client::Tokens tokens{{static_cast<int32_t>(worker * client::kExpertsEach)}};
    const int64_t began = now();
    auto made = scene.client.submit(tokens.batch(), 3);
    if (!made.ok()) return {std::move(made).error(), 0};
    CHECK(wait(made.value()));
    Status outcome = scene.client.outcome(made.value());
    if (outcome.ok()) CHECK(tokens.is_right());
    return {std::move(outcome), now() - began};
  }
  // Gives a worker a new path, and new pulses where it was lost.
  void reconnect(uint32_t worker, bool is_lost) {
    auto pair = transport::make_loopback({3, 4096, 4096}).value();
    client::NewPath path{std::move(pair.host), ++generation_};
    client::Puppet& puppet = scene.puppets[worker];
    if (is_lost) {
      int ends[2];
      CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
      CHECK(scene.client.replace_worker(worker, std::move(path), OwnedFd(ends[0])).ok());
      puppet.pulse = OwnedFd(ends[1]);
    } else {
      if (scene.client.workers()[worker].path != client::PathState::kWorn)
        CHECK(scene.client.retire_path(worker, "a test").ok());
      static_cast<void>(scene.client.retire_worn_paths());
      CHECK(scene.client.renew_path(worker, std::move(path)).ok());
    }
    puppet.channel = std::move(pair.worker);
    workers[worker].asked.clear();
  }
  bool is_lost(uint32_t worker) const {
    return scene.client.workers()[worker].path == client::PathState::kLost;
  }

  Scheduler scheduler;
  client::PuppetScene scene;
  std::vector<Worker> workers;

 private:
  static client::SceneOptions with_pulses(client::SceneOptions options) {
    options.has_pulses = true;
    return options;
  }
  // Every millisecond.
  void act() {
    if (host_ == nullptr) return;
    for (uint32_t i = 0; i < workers.size(); ++i) act(workers[i], scene.puppets[i]);
    host_->wake();
    scheduler.after(kMs, [this] { act(); });
  }
  void act(Worker& worker, client::Puppet& puppet) {
    if (worker.is_stopped) return;
    if (worker.is_pulsing && ++counter_ % 20 == 0) {
      std::array<std::byte, wire::kPulseBytes> bytes;
      wire::encode_pulse(counter_, bytes);
      static_cast<void>(
          ::send(puppet.pulse.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
    }
    for (auto polled = puppet.channel->poll(); polled.ok() && polled.value();
         polled = puppet.channel->poll())
      take(worker, *polled.value());
    if (worker.is_mute || worker.asked.empty() || now() - worker.begun_ns < worker.answer_ns)
      return;
    const std::vector<std::byte> reply = client::echo(worker.asked.front()).bytes();
    std::copy(reply.begin(), reply.end(),
              puppet.channel->outgoing(worker.asked.front().slot).begin());
    static_cast<void>(puppet.channel->publish(worker.asked.front().slot, reply.size()));
    worker.asked.pop_front();
    worker.begun_ns = now();
  }
  void take(Worker& worker, const transport::Arrival& arrival) {
    client::Message message;
    message.slot = arrival.slot;
    message.header =
        wire::decode_frame_header(arrival.bytes.first<wire::kFrameHeaderBytes>()).value();
    message.payload.assign(arrival.bytes.begin() + wire::kFrameHeaderBytes, arrival.bytes.end());
    if (worker.asked.empty()) worker.begun_ns = now();
    worker.asked.push_back(std::move(message));
    ++worker.num_requests;
  }

  Task* host_ = nullptr;
  uint64_t counter_ = 0;
  uint64_t generation_ = client::kGeneration;
};

}  // namespace dflash::simulation
