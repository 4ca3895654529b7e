// Orders travel to a worker as control messages do, and its answers back; both wait for a network
// that is cut. A step that is not done in time has failed.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/simulated_keeper.h"

#include <sys/socket.h>

#include <algorithm>
#include <string_view>
#include <utility>

namespace dflash::simulation {

using transport::Side;

namespace {

constexpr int64_t kPatienceNs = 2'000'000'000;      // for a worker's answer
constexpr int64_t kEndNs = 5'000'000;               // what ending and reaping a process takes
constexpr int64_t kLongestMappingNs = 500'000'000;  // of the host's own copy
constexpr int64_t kLongestReleaseNs =
    2'000'000'000;  // until somebody releases a quarantined worker

// Gives the order a pulse and returns the host's end of it.
OwnedFd add_pulse(PathOrder& order, Scheduler& scheduler) {
  int fds[2];
  check(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0, "no socket for a pulse");
  order.pulse = OwnedFd(fds[1]);
  order.is_pulse_closed = std::make_shared<bool>(false);
  scheduler.watch(fds[0], order.is_pulse_closed);
  return OwnedFd(fds[0]);
}

}  // namespace

SimulatedKeeper::SimulatedKeeper(World& world, uint32_t host, client::ExpertClient& client,
                                 Membership& membership)
    : world_(world),
      host_(host),
      client_(client),
      membership_(membership),
      random_(world.random.split()),
      is_last_resort_missing_(world.options.joins_late) {
  members_.resize(world.num_remote());
  for (uint32_t worker = 0; worker < members_.size(); ++worker) {
    for (const Happening what : {Happening::kAdded, Happening::kStarted, Happening::kJoined}) {
      MemberDecision& decided = members_[worker].decided;
      decided = membership_.on({worker, what, decided.attempt}, world_.scheduler.now_ns());
    }
  }
}

std::shared_ptr<SimulatedLink> SimulatedKeeper::make_link(uint32_t worker) {
  const Options& options = world_.options;
  auto link = SimulatedLink::create(world_.link_context(host_, worker),
                                    {options.num_slots, options.slot_bytes, options.slot_bytes},
                                    world_.next_generation(),
                                    options.hosts[host_].networks[worker].is_stream);
  check(link.ok(), "no memory for a simulated data path");
  return std::move(link).value();
}

client::NewPath SimulatedKeeper::new_path(const std::shared_ptr<SimulatedLink>& link) {
  link->set_listener(Side::kHost, world_.scheduler.running());
  return {link->end(Side::kHost), link->generation()};
}

// Returns the path, of which `order` has the worker's end of the pulse.
std::shared_ptr<SimulatedLink> SimulatedKeeper::add(uint32_t worker, PathOrder& order) {
  auto link = make_link(worker);
  client::NewWorker added;
  added.name = std::string("w").append(std::to_string(worker));
  added.path = new_path(link);
  added.policy = {world_.options.slice_tokens, world_.options.window};
  added.is_last_resort = world_.options.workers[worker].is_last_resort;
  order.link = link;
  if (!added.is_last_resort) {  // one in this process has no pulses
    added.pulse = add_pulse(order, world_.scheduler);
  }
  const bool is_remote = !added.is_last_resort;
  check(client_.add_worker(std::move(added)).ok(), "the client takes a simulated worker");
  if (is_remote) {
    check(client_.set_remedy(worker, true).ok(), "the client knows the worker");
    check(client_.set_stand_in(worker, world_.options.joins_late).ok(),
          "the client knows the worker");
  }
  return link;
}

void SimulatedKeeper::add_worker(uint32_t worker) {
  PathOrder order{nullptr, {}, nullptr, [] {}};
  add(worker, order);
  world_.workers[worker].process().session(host_).accept(std::move(order));
  world_.set_attached(host_, worker, true);
}

// The path and the pulse that a worker of the client must have lead nowhere.
void SimulatedKeeper::add_lost_worker(uint32_t worker) {
  PathOrder order{nullptr, {}, nullptr, [] {}};
  add(worker, order);
  client_.mark_lost(worker, "its host was started anew");
  detach(worker, "its host was started anew");
}

void SimulatedKeeper::end() {
  is_over_ = true;
  for (Tracked& tracked : members_) {
    tracked.accepted = nullptr;
    ++tracked.num_steps;
  }
}

void SimulatedKeeper::name_holders(bool with_last_resort) {
  for (uint32_t shard = 0; shard < world_.options.holders.size(); ++shard) {
    std::vector<uint32_t> holders = world_.options.holders[shard];
    if (!with_last_resort) holders.pop_back();
    check(client_.set_holders(0, shard, holders).ok(), "the client takes holders");
  }
}

// -- events
// ----------------------------------------------------------------------------------------

// Any stack.
void SimulatedKeeper::post(uint32_t worker, Happening what, uint64_t attempt, const char* reason,
                           bool is_death) {
  ++num_posted_;
  world_.scheduler.after(
      0, [this, event = MemberEvent{worker, what, attempt, reason, is_death}] { handle(event); });
}

void SimulatedKeeper::handle(const MemberEvent& event) {
  --num_posted_;
  if (is_over_) return;
  world_.record(JournalEvent::kMember, world_.label(host_, event.worker), event.attempt,
                static_cast<uint64_t>(event.what));
  const uint32_t worker = event.worker;
  Tracked& tracked = members_[worker];
  const std::string before = tracked.decided.state;
  tracked.decided = membership_.on(event, world_.scheduler.now_ns());
  for (const MemberOrder& order : tracked.decided.orders) {
    if (order.task == "wait") {
      world_.scheduler.at(order.until_ns, [this, worker] { post(worker, Happening::kDue, 0); });
    } else {
      tracked.orders.push_back(order);
    }
  }
  const std::string& state = tracked.decided.state;
  if (state != before && state == "quarantined") {
    world_.scheduler.after(random_.magnitude(kLongestReleaseNs / 100, kLongestReleaseNs),
                           [this, worker] { post(worker, Happening::kReleased, 0); });
  }
  if (state != before && state == "gone" && tracked.is_wanted) post(worker, Happening::kAdded, 0);
  task().wake();
}

// The first time that somebody is missed. It takes as long as mapping files does.
void SimulatedKeeper::make_last_resort() {
  if (!world_.options.joins_late || last_resort_joins_ns_ > 0) return;
  last_resort_joins_ns_ =
      world_.scheduler.now_ns() + random_.magnitude(kLongestMappingNs / 100, kLongestMappingNs);
}

// The host's own copy, while it is missing, would be made for a worker that is lost and not for one
// that is removed. So the last ready holder of a shard stays, as it does at a real host that does
// not say `force` (holders/elastic.py).
void SimulatedKeeper::remove(uint32_t worker) {
  if (is_last_resort_missing_ && is_last_holder(worker)) return;
  members_[worker].is_wanted = false;
  post(worker, Happening::kRemoved, 0);
}

void SimulatedKeeper::want_back(uint32_t worker) {
  if (std::exchange(members_[worker].is_wanted, true)) return;
  post(worker, Happening::kAdded, 0);
}

bool SimulatedKeeper::is_last_holder(uint32_t worker) const {
  const auto is_other = [&](uint32_t holder) {
    return holder != worker && holder < members_.size() &&
           members_[holder].decided.state == "ready";
  };
  const auto is_lone = [&](const std::vector<uint32_t>& holders) {
    return std::find(holders.begin(), holders.end(), worker) != holders.end() &&
           std::none_of(holders.begin(), holders.end(), is_other);
  };
  return std::any_of(world_.options.holders.begin(), world_.options.holders.end(), is_lone);
}

void SimulatedKeeper::take_events() {
  for (const client::ClientEvent& event : client_.take_events()) {
    if (event.worker >= members_.size()) continue;
    Tracked& tracked = members_[event.worker];
    if (event.kind == client::EventKind::kSuspect) has_suspected_ = true;
    if (event.kind == client::EventKind::kSuspect || event.kind == client::EventKind::kLost)
      make_last_resort();
    if (event.kind == client::EventKind::kIdle && tracked.decided.state == "draining")
      post(event.worker, Happening::kDrained, tracked.decided.attempt);
    if (event.kind == client::EventKind::kLost && tracked.is_attached)
      detach(event.worker, "the calls have given it up");
  }
}

// A process that has ended is reaped, whether or not the client has seen it hang up.
void SimulatedKeeper::note_ends() {
  const int64_t now = world_.scheduler.now_ns();
  for (uint32_t worker = 0; worker < members_.size(); ++worker) {
    Tracked& tracked = members_[worker];
    // That of a process which somebody else has started tells by its pulse alone.
    const bool is_alive = world_.workers[worker].process().is_alive() ||
                          !world_.options.workers[worker].is_started_by_host;
    if (tracked.is_attached && !is_alive) {
      static_cast<void>(client_.mark_lost(worker, "its process has ended"));
      detach(worker, "its process has ended");
    } else if (tracked.is_attached && tracked.is_renewing && now >= tracked.give_up_ns) {
      static_cast<void>(client_.mark_lost(worker, "its data path was not renewed in time"));
      detach(worker, "its data path was not renewed in time");
    } else if (tracked.is_joining && !is_alive) {
      fail(worker, Happening::kFailed, "its process has ended", true);
    } else if (tracked.is_joining && now >= tracked.give_up_ns) {
      fail(worker, Happening::kFailed, "it does not answer", true);
    }
  }
}

void SimulatedKeeper::excuse(int64_t ns) {
  for (Tracked& tracked : members_) tracked.give_up_ns += ns;
}

void SimulatedKeeper::detach(uint32_t worker, const char* reason) {
  Tracked& tracked = members_[worker];
  world_.record(JournalEvent::kLost, world_.label(host_, worker));
  world_.set_attached(host_, worker, false);
  tracked.is_attached = tracked.is_renewing = false;
  tracked.accepted = nullptr;
  ++tracked.num_steps;
  post(worker, Happening::kLost, tracked.step_attempt == 0 ? 1 : tracked.step_attempt, reason);
}

void SimulatedKeeper::look() {
  for (const client::WornPath& worn : client_.retire_worn_paths()) {
    world_.record(JournalEvent::kRetire, world_.label(host_, worn.worker));
    if (worn.worker >= members_.size()) {
      send_path(worn.worker, false);
      continue;
    }
    members_[worn.worker].is_renewing = true;
    send_path(worn.worker, false);
  }
  take_events();
  note_ends();
  if (last_resort_joins_ns_ > 0 && world_.scheduler.now_ns() >= last_resort_joins_ns_ &&
      std::exchange(is_last_resort_missing_, false))
    name_holders(true);
  const bool is_making = last_resort_joins_ns_ > 0 && is_last_resort_missing_;
  for (uint32_t worker = 0; worker < members_.size(); ++worker) {
    Tracked& tracked = members_[worker];
    if (tracked.accepted != nullptr) take_accepted(worker);
    static_cast<void>(client_.set_remedy(worker, tracked.decided.is_coming || is_making));
    for (const MemberOrder& order : std::exchange(tracked.orders, {})) carry_out(worker, order);
  }
}

// -- orders
// ----------------------------------------------------------------------------------------

void SimulatedKeeper::carry_out(uint32_t worker, const MemberOrder& order) {
  const std::string_view task = order.task;
  if (task == "start") return start(worker, order.attempt);
  if (task == "join") return join(worker, order.attempt);
  if (task == "end") return end(worker, order.attempt);
  check(task == "drain", "an order that nobody knows");
  drain(worker, order.attempt);
}

void SimulatedKeeper::start(uint32_t worker, uint64_t attempt) {
  members_[worker].step_attempt = attempt;
  if (world_.options.workers[worker].is_started_by_host) return start_process(worker, attempt);
  dial(worker, attempt);
}

void SimulatedKeeper::start_process(uint32_t worker, uint64_t attempt) {
  const uint64_t step = ++members_[worker].num_steps;
  world_.scheduler.after(world_.options.restart_ns, [this, worker, attempt, step] {
    if (!is_current(worker, step)) return;
    SimulatedWorker& simulated = world_.workers[worker];
    if (world_.scheduler.now_ns() < simulated.crashes_until_ns)
      return post(worker, Happening::kFailed, attempt, "it dies when it is started");
    if (!simulated.process().is_alive()) world_.start_process(worker);
    post(worker, Happening::kStarted, attempt);
  });
}

// Dials a worker that somebody else starts. Where no answer comes within kPatienceNs the attempt
// has failed, but that counts as no death: the worker may live and only be out of reach, and after
// too many deaths it would be left alone (holders/membership.py).
void SimulatedKeeper::dial(uint32_t worker, uint64_t attempt) {
  const uint64_t step = ++members_[worker].num_steps;
  travel(worker, Side::kHost, [this, worker, attempt, step] {
    const WorkerProcess& process = world_.workers[worker].process();
    if (!process.is_alive() || process.is_frozen()) return;
    travel(worker, Side::kWorker, [this, worker, attempt, step] {
      if (!is_current(worker, step)) return;
      ++members_[worker].num_steps;
      post(worker, Happening::kStarted, attempt);
    });
  });
  world_.scheduler.after(kPatienceNs, [this, worker, attempt, step] {
    if (!is_current(worker, step)) return;
    ++members_[worker].num_steps;
    post(worker, Happening::kFailed, attempt, "it does not answer", false);
  });
}

void SimulatedKeeper::join(uint32_t worker, uint64_t attempt) {
  Tracked& tracked = members_[worker];
  const uint64_t step = ++tracked.num_steps;
  tracked.is_joining = true;
  tracked.step_attempt = attempt;
  tracked.give_up_ns = world_.scheduler.now_ns() + world_.options.load_ns + kPatienceNs;
  world_.scheduler.after(world_.options.load_ns, [this, worker, step] {
    if (!is_current(worker, step)) return;
    if (std::exchange(link_to(worker).is_unfit, false))
      return fail(worker, Happening::kUnfit, "it loaded other weights", false);
    send_path(worker, true);
  });
}

// What is under way for the worker comes to nothing.
void SimulatedKeeper::fail(uint32_t worker, Happening what, const char* reason, bool is_death) {
  Tracked& tracked = members_[worker];
  tracked.is_joining = false;
  tracked.accepted = nullptr;
  ++tracked.num_steps;
  post(worker, what, tracked.step_attempt, reason, is_death);
}

void SimulatedKeeper::end(uint32_t worker, uint64_t attempt) {
  Tracked& tracked = members_[worker];
  tracked.is_attached = tracked.is_renewing = tracked.is_joining = false;
  tracked.accepted = nullptr;
  ++tracked.num_steps;
  world_.set_attached(host_, worker, false);
  static_cast<void>(client_.mark_lost(worker, "it is ended"));
  if (world_.options.workers[worker].is_started_by_host) {
    // Where the machine had nothing before, nothing of it is left behind in its links either.
    world_.workers[worker].process().kill(false);
  }
  world_.scheduler.after(kEndNs,
                         [this, worker, attempt] { post(worker, Happening::kEnded, attempt); });
}

void SimulatedKeeper::drain(uint32_t worker, uint64_t attempt) {
  static_cast<void>(client_.set_admission(worker, client::Admission::kDraining));
  world_.scheduler.after(world_.options.drain_ns,
                         [this, worker, attempt] { post(worker, Happening::kDrained, attempt); });
}

// -- paths
// -----------------------------------------------------------------------------------------

void SimulatedKeeper::travel(uint32_t worker, Side from, std::function<void()> action) {
  const Network& network = link_to(worker).network;
  const int64_t there = world_.scheduler.now_ns() + network.delay_ns + network.added_delay_ns;
  world_.scheduler.at(network.passes_at(from, there), std::move(action));
}

void SimulatedKeeper::send_path(uint32_t worker, bool is_session) {
  auto link = make_link(worker);
  auto path = std::make_shared<Path>(Path{link, {}});
  auto sent = std::make_shared<PathOrder>();
  sent->link = link;
  if (worker >= members_.size()) {  // in this process: nothing travels
    world_.workers[worker].process().session(host_).accept({link, {}, nullptr, [] {}});
    check(client_.renew_path(worker, new_path(link)).ok(), "a path in this process is renewed");
    return;
  }
  Tracked& tracked = members_[worker];
  const uint64_t step = ++tracked.num_steps;
  if (!is_session) tracked.give_up_ns = world_.scheduler.now_ns() + kPatienceNs;
  if (is_session) path->pulse = add_pulse(*sent, world_.scheduler);
  sent->on_accepted = [this, worker, step, path] {
    travel(worker, Side::kWorker, [this, worker, step, path] {
      if (!is_current(worker, step)) return;
      members_[worker].accepted = std::make_unique<Path>(std::move(*path));
      task().wake();
    });
  };
  travel(worker, Side::kHost, [this, worker, sent] {
    if (is_over_) return;  // its control connection has ended
    world_.workers[worker].process().session(host_).accept(std::move(*sent));
  });
}

// An error means that the client has lost the worker meanwhile, of which its event tells.
void SimulatedKeeper::take_accepted(uint32_t worker) {
  Tracked& tracked = members_[worker];
  const std::unique_ptr<Path> path = std::exchange(tracked.accepted, nullptr);
  if (!tracked.is_joining) {
    tracked.is_renewing = false;
    const bool is_renewed = client_.renew_path(worker, new_path(path->link)).ok();
    if (is_renewed)
      world_.record(JournalEvent::kAttach, world_.label(host_, worker), path->link->generation());
    return;
  }
  tracked.is_joining = false;
  static_cast<void>(client_.set_admission(worker, client::Admission::kOpen));
  const Status taken = client_.replace_worker(worker, new_path(path->link), std::move(path->pulse));
  check(taken.ok(), "the client takes a worker back that it has lost");
  world_.record(JournalEvent::kAttach, world_.label(host_, worker), path->link->generation());
  tracked.is_attached = true;
  world_.set_attached(host_, worker, world_.workers[worker].process().is_alive());
  post(worker, Happening::kJoined, tracked.step_attempt);
}

bool SimulatedKeeper::is_whole() const {
  const auto reports = client_.workers();
  const auto is_fit = [](const client::WorkerReport& report) {
    return report.quarantined_slots == 0 && report.path != client::PathState::kLost;
  };
  return num_posted_ == 0 && std::all_of(reports.begin(), reports.end(), is_fit) &&
         std::all_of(members_.begin(), members_.end(), [](const Tracked& tracked) {
           return tracked.is_attached && tracked.decided.state == "ready";
         });
}

}  // namespace dflash::simulation
