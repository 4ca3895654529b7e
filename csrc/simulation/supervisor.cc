// Orders travel to a worker as control messages do, and its answers back; both wait for a network
// that is cut. An order that is not answered in time is given up.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/supervisor.h"

#include <sys/socket.h>

#include <algorithm>
#include <utility>

namespace dflash::simulation {

using transport::Side;

namespace {

constexpr int64_t kPatienceNs = 2'000'000'000;   // for the answer to an order
constexpr int64_t kRetryNs = 100'000'000;        // before a lost worker is called again
constexpr int64_t kReportPeriodNs = 50'000'000;  // how often the client is asked who is lost

struct PulsePair {
  OwnedFd host, worker;
};

PulsePair make_pulse_pair() {
  int fds[2];
  check(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0, "no socket for a pulse");
  return {OwnedFd(fds[0]), OwnedFd(fds[1])};
}

}  // namespace

std::shared_ptr<Link> Supervisor::make_link(uint32_t worker) {
  const Options& options = world_.options;
  auto link = Link::create(world_.link_context(worker),
                           {options.num_slots, options.slot_bytes, options.slot_bytes},
                           world_.next_generation(), options.workers[worker].is_stream);
  check(link.ok(), "no memory for a simulated data path");
  return std::move(link).value();
}

client::NewPath Supervisor::new_path(const std::shared_ptr<Link>& link) {
  link->set_listener(Side::kHost, world_.scheduler.running());
  return {link->end(Side::kHost), link->generation()};
}

void Supervisor::add_worker(uint32_t worker) {
  auto link = make_link(worker);
  PulsePair pulse = make_pulse_pair();
  client::NewWorker added;
  added.name = std::string("w").append(std::to_string(worker));
  added.path = new_path(link);
  added.pulse = std::move(pulse.host);
  added.policy = {world_.options.slice_tokens, world_.options.window};
  check(client_.add_worker(std::move(added)).ok(), "the client takes a simulated worker");
  check(client_.set_remedy(worker, true).ok(), "the client knows the worker");
  world_.members[worker].process().accept({link, std::move(pulse.worker), [] {}});
  world_.set_attached(worker, true);
}

void Supervisor::look() {
  const int64_t now = world_.scheduler.now_ns();
  for (const client::WornPath& worn : client_.retire_worn_paths()) {
    world_.record(EventKind::kRetire, worn.worker);
    members_[worn.worker].state = State::kRenewing;
    order(worn.worker, false);
  }
  if (now >= next_reports_ns_) note_lost();
  for (uint32_t worker = 0; worker < members_.size(); ++worker) {
    Tracked& tracked = members_[worker];
    if (tracked.accepted != nullptr) {
      take_accepted(worker);
    } else if (tracked.state == State::kRenewing && now >= tracked.retry_at_ns) {
      client_.mark_lost(worker, "its data path was not renewed in time");
      lose(worker);
    } else if (now >= tracked.retry_at_ns &&
               (tracked.state == State::kLost || tracked.state == State::kConnecting)) {
      tracked.state = State::kConnecting;
      order(worker, true);
    }
  }
}

void Supervisor::note_lost() {
  next_reports_ns_ = world_.scheduler.now_ns() + kReportPeriodNs;
  const auto reports = client_.workers();
  for (uint32_t worker = 0; worker < members_.size(); ++worker) {
    const State state = members_[worker].state;
    const bool is_lost = reports[worker].path == client::PathState::kLost;
    if (is_lost && (state == State::kAttached || state == State::kRenewing)) lose(worker);
    // A process that has ended is reaped, whether or not the client has seen it hang up.
    if (!is_lost && state == State::kAttached && !world_.members[worker].process().is_alive()) {
      client_.mark_lost(worker, "its process has ended");
      lose(worker);
    }
  }
}

void Supervisor::lose(uint32_t worker) {
  world_.record(EventKind::kLost, worker);
  world_.set_attached(worker, false);
  Tracked& tracked = members_[worker];
  tracked.state = State::kLost;
  tracked.accepted = nullptr;
  ++tracked.num_orders;
  tracked.retry_at_ns = world_.scheduler.now_ns() + kRetryNs;
}

void Supervisor::order(uint32_t worker, bool is_session) {
  Tracked& tracked = members_[worker];
  const uint64_t number = ++tracked.num_orders;
  tracked.retry_at_ns = world_.scheduler.now_ns() + kPatienceNs;
  auto link = make_link(worker);
  auto path = std::make_shared<Path>(Path{link, {}});
  auto sent = std::make_shared<PathOrder>();
  sent->link = link;
  if (is_session) {
    PulsePair pulse = make_pulse_pair();
    path->pulse = std::move(pulse.host);
    sent->pulse = std::move(pulse.worker);
  }
  const auto travels = [this, worker](Side from, std::function<void()> action) {
    const Network& network = world_.members[worker].network;
    const int64_t there = world_.scheduler.now_ns() + network.delay_ns + network.added_delay_ns;
    world_.scheduler.at(network.passes_at(from, there), std::move(action));
  };
  sent->on_accepted = [this, worker, number, path, travels] {
    travels(Side::kWorker, [this, worker, number, path] {
      if (members_[worker].num_orders == number)
        members_[worker].accepted = std::make_unique<Path>(std::move(*path));
    });
  };
  travels(Side::kHost,
          [this, worker, sent] { world_.members[worker].process().accept(std::move(*sent)); });
}

// Errors mean that the client has lost the worker meanwhile, which note_lost() sees.
void Supervisor::take_accepted(uint32_t worker) {
  Tracked& tracked = members_[worker];
  const std::unique_ptr<Path> path = std::exchange(tracked.accepted, nullptr);
  const bool is_session = tracked.state == State::kConnecting;
  const Status taken =
      is_session ? client_.replace_worker(worker, new_path(path->link), std::move(path->pulse))
                 : client_.renew_path(worker, new_path(path->link));
  if (!taken.ok()) return lose(worker);
  world_.record(EventKind::kAttach, worker, path->link->generation());
  tracked.state = State::kAttached;
  world_.set_attached(worker, true);
}

bool Supervisor::is_whole() const {
  const auto reports = client_.workers();
  for (uint32_t worker = 0; worker < members_.size(); ++worker) {
    if (members_[worker].state != State::kAttached || reports[worker].quarantined_slots > 0 ||
        reports[worker].path == client::PathState::kLost)
      return false;
  }
  return true;
}

}  // namespace dflash::simulation
