// SPDX-License-Identifier: Apache-2.0
#include "failover/campaign.h"

#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#include <algorithm>
#include <cstring>

#include "client/call.h"
#include "failover/fleet.h"
#include "failover/rounds.h"

namespace dflash::failover {
namespace {

// Above what anything takes on a busy machine, sanitizers included.
constexpr int64_t kPatienceMs = 60'000;
constexpr int64_t kCallTimeoutNs = 30'000'000'000;
// How long the host looks away at most, so that a reply lies unread.
constexpr int64_t kLookAwayMs = 20;
// How often it looks for a dead process while calls are under way.
constexpr int64_t kReapMs = 1;
constexpr uint64_t kSeedsApart = 1'000'003;  // more than a campaign has events
constexpr uint32_t kMostLooks = 8;           // at the channel before a computing worker is struck

void nap_us(int64_t microseconds) {
  const timespec span{microseconds / 1'000'000, microseconds % 1'000'000 * 1000};
  ::nanosleep(&span, nullptr);
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// When the process of a killed worker is replaced.
enum class Revival : uint8_t { kInCall, kAfterCall, kLater };

class Campaign {
 public:
  Campaign(const CampaignOptions& options, Fleet& fleet)
      : options_(options), fleet_(fleet), client_(fleet.client()), random_(options.seed) {
    for (const uint32_t size : kSizes) {
      for (uint32_t i = 0; i < kBatchesPerSize; ++i)
        batches_.emplace_back(random_, size, kNumWorkers * kExpertsEach, kNumWorkers);
    }
  }

  CampaignReport run() {
    compute_expected();
    for (uint32_t i = 0; i < options_.baseline_rounds; ++i) {
      for (uint32_t size = 0; size < kSizes.size(); ++size) {
        undisturbed_round(size, 1);
        undisturbed_round(size, kMostCalls);
      }
    }
    for (uint32_t shape = 0; shape < kNumShapes; ++shape)
      usual_ns_[shape] = static_cast<int64_t>(median(undisturbed_ms_[shape]) * 1e6);
    uint64_t number = 0;
    for (const EventKind kind : drawn_kinds()) {
      // How many rounds a stopped worker takes to be well again is up to the machine; what the next
      // event draws is not.
      random_.seed(options_.seed * kSeedsApart + ++number);
      one_event(kind);
      revive_lost();
      undisturbed_round(draw(kSizes.size()), draw(4) == 0 ? kMostCalls : 1);
    }
    for (StrikeEvent& event : report_.events) {
      for (size_t i = 0; i < event.call_ms.size(); ++i)
        event.stall_ms =
            std::max(event.stall_ms, event.call_ms[i] - median(undisturbed_ms_[event.shapes[i]]));
    }
    for (uint32_t size = 0; size < kSizes.size(); ++size)
      report_.usual_ms[size] = median(undisturbed_ms_[shape_of(size, 1, 0)]);
    for (const client::CountersOf& one : client_.counters()) {
      report_.failovers += one.counters.failovers;
      report_.hedges += one.counters.hedges;
      report_.hedges_won += one.counters.hedges_won;
      report_.superseded += one.counters.superseded;
    }
    return std::move(report_);
  }

 private:
  struct Flying {
    const Batch* batch = nullptr;
    client::CallPtr call;
    std::vector<float> output;
  };

  uint32_t draw(uint64_t bound) { return static_cast<uint32_t>(random_() % bound); }

  std::vector<EventKind> drawn_kinds() {
    std::vector<EventKind> kinds(options_.num_kills, EventKind::kKill);
    kinds.insert(kinds.end(), options_.num_stops, EventKind::kStop);
    kinds.insert(kinds.end(), options_.num_lone_kills, EventKind::kLoneKill);
    for (size_t i = kinds.size(); i > 1; --i) std::swap(kinds[i - 1], kinds[draw(i)]);
    return kinds;
  }

  // The run without faults, once for every batch.
  void compute_expected() {
    for (Batch& batch : batches_) {
      auto call = client_.submit(batch.into(batch.expected), kLayer);
      const Status done = call.ok() ? finished(call.value()) : Status(std::move(call).error());
      if (!done.ok()) note_failure(done.error(), nullptr);
    }
  }

  Status finished(const client::CallPtr& call) {
    if (!client_.wait(call, Deadline::after_ms(kPatienceMs))) {
      client_.abandon(call);
      return Error{ErrorCode::kTimeout, "a call outlived its deadline"};
    }
    return client_.outcome(call);
  }

  void note_failure(const Error& error, StrikeEvent* event) {
    ++report_.num_failed;
    if (report_.first_error.empty()) report_.first_error = error.message;
    if (event == nullptr) return;
    if (event->num_failed++ == 0) event->error = error.message;
  }

  std::vector<Flying> submit(uint32_t size, uint32_t num_calls, StrikeEvent* event) {
    std::vector<Flying> flying(num_calls);
    for (Flying& one : flying) {
      one.batch = &batches_[size * kBatchesPerSize + draw(kBatchesPerSize)];
      ++report_.num_calls;
      auto call = client_.submit(one.batch->into(one.output), kLayer);
      if (call.ok())
        one.call = std::move(call).value();
      else
        note_failure(call.error(), event);
    }
    return flying;
  }

  // Waits for the end of all calls, compares their outputs and returns how long each took.
  std::vector<double> collect(std::vector<Flying>& flying, StrikeEvent* event) {
    std::vector<double> took_ms;
    for (Flying& one : flying) {
      if (one.call == nullptr) continue;
      const Status outcome = finished(one.call);
      took_ms.push_back(static_cast<double>(one.call->ended_ns - one.call->submitted_ns) / 1e6);
      if (!outcome.ok()) {
        note_failure(outcome.error(), event);
      } else if (std::memcmp(one.output.data(), one.batch->expected.data(),
                             one.output.size() * sizeof(float)) != 0) {
        ++report_.num_wrong;
        if (event != nullptr) ++event->num_wrong;
      }
    }
    return took_ms;
  }

  // A round in which nothing happens, and which counts for the medians if all workers are there.
  void undisturbed_round(uint32_t size, uint32_t num_calls) {
    const bool counts = fleet_.are_all_alive();
    std::vector<Flying> flying = submit(size, num_calls, nullptr);
    const std::vector<double> took_ms = collect(flying, nullptr);
    if (!counts || took_ms.size() != num_calls) return;
    for (uint32_t place = 0; place < num_calls; ++place)
      undisturbed_ms_[shape_of(size, num_calls, place)].push_back(took_ms[place]);
  }

  void one_event(EventKind kind) {
    StrikeEvent event;
    event.kind = kind;
    event.moment = static_cast<Moment>(draw(kNumMoments));
    event.worker = draw(kNumWorkers);
    event.pid = fleet_.pid(event.worker);
    const uint32_t size = draw(kSizes.size());
    event.num_calls = draw(4) == 0 ? kMostCalls : 1;
    event.num_tokens = kSizes[size];
    const auto revival =
        kind == EventKind::kLoneKill ? Revival::kInCall : static_cast<Revival>(draw(3));
    const bool is_lone = kind == EventKind::kLoneKill;
    if (is_lone && !must(fleet_.set_lone(event.worker, true))) return;
    strike_in_round(event, size, revival);
    if (kind == EventKind::kStop) {
      go_on(event);
    } else {
      bring_back(event, revival);
    }
    if (is_lone) must(fleet_.set_lone(event.worker, false));
    report_.events.push_back(std::move(event));
  }

  void strike_in_round(StrikeEvent& event, uint32_t size, Revival revival) {
    const int sent = event.kind == EventKind::kStop ? SIGSTOP : SIGKILL;
    Orders& orders = fleet_.orders(event.worker);
    const uint32_t num_obeyed = orders.num_obeyed.load(std::memory_order_acquire);
    const bool by_host = event.moment == Moment::kIdle || event.moment == Moment::kAnyTime;
    if (!by_host) orders.give(event.moment, draw(kMostLooks), sent);
    if (event.moment == Moment::kIdle) fleet_.signal(event.worker, sent);
    std::vector<Flying> flying = submit(size, event.num_calls, &event);
    const auto has_obeyed = [&] {
      return orders.num_obeyed.load(std::memory_order_acquire) != num_obeyed;
    };
    if (event.moment == Moment::kAnyTime) {
      const int64_t usual = usual_ns_[shape_of(size, event.num_calls, event.num_calls - 1)];
      const int64_t delay_ns = static_cast<int64_t>(draw(1000)) * (usual + usual / 4) / 1000;
      const Deadline until = Deadline::after_ns(delay_ns);
      for (Flying& one : flying) {
        if (one.call != nullptr) static_cast<void>(client_.wait(one.call, until));
      }
      fleet_.signal(event.worker, sent);
    }
    // What is small enough to be written without the host's help lies unread then.
    if (event.moment == Moment::kUnread && kSizes[size] <= 4) {
      const Deadline until = Deadline::after_ms(kLookAwayMs);
      while (!has_obeyed() && !until.has_passed()) nap_us(50);
    }
    if (revival == Revival::kInCall && event.kind != EventKind::kStop)
      revive_in_call(flying, event.worker);
    event.call_ms = collect(flying, &event);
    for (uint32_t place = 0; place < event.call_ms.size(); ++place)
      event.shapes.push_back(shape_of(size, event.num_calls, place));
    orders.withdraw();
    event.is_obeyed = by_host || has_obeyed();
  }

  // While calls are under way, and for the only holder of a shard so that they can end at all.
  void revive_in_call(const std::vector<Flying>& flying, uint32_t worker) {
    const Deadline deadline = Deadline::after_ms(kPatienceMs);
    for (const Flying& one : flying) {
      while (one.call != nullptr && !deadline.has_passed() &&
             !client_.wait(one.call, Deadline::after_ms(kReapMs))) {
        if (fleet_.is_alive(worker) && fleet_.try_reap(worker)) must(fleet_.revive(worker));
      }
    }
  }

  void bring_back(const StrikeEvent& event, Revival revival) {
    if (fleet_.pid(event.worker) == event.pid) fleet_.kill(event.worker);
    if (revival == Revival::kLater) {
      for (uint32_t rounds = 1 + draw(2); rounds > 0; --rounds)
        undisturbed_round(draw(kSizes.size()), 1);
    }
    if (!fleet_.is_alive(event.worker)) must(fleet_.revive(event.worker));
  }

  // Lets a stopped worker go on, after further calls, and waits until it is as before: its late
  // replies have come, and it shows progress.
  void go_on(const StrikeEvent& event) {
    for (uint32_t rounds = draw(3); rounds > 0; --rounds) stopped_round();
    fleet_.signal(event.worker, SIGCONT);
    const Deadline deadline = Deadline::after_ms(kPatienceMs);
    while (!is_settled(event.worker)) {
      if (deadline.has_passed()) {
        ++report_.num_unsettled;
        return;
      }
      stopped_round();
      nap_us(2000);
    }
  }
  // Its times are not those of a round in which nothing happens.
  void stopped_round() {
    std::vector<Flying> flying = submit(draw(kSizes.size()), 1, nullptr);
    static_cast<void>(collect(flying, nullptr));
  }
  bool is_settled(uint32_t worker) const {
    const client::WorkerReport report = client_.workers()[worker];
    return report.path == client::PathState::kLost ||
           (report.standing != client::Standing::kSuspect && report.quarantined_slots == 0);
  }

  // A supervisor brings back whatever was lost, also what nobody had killed.
  void revive_lost() {
    const std::vector<client::WorkerReport> reports = client_.workers();
    for (uint32_t worker = 0; worker < kNumWorkers; ++worker) {
      if (reports[worker].path != client::PathState::kLost) continue;
      ++report_.num_lost_unasked;
      must(fleet_.revive(worker));
    }
    static_cast<void>(client_.take_events());
  }

  // What cannot fail on a healthy machine; where it does, a call could not have been served.
  bool must(const Status& status) {
    if (!status.ok()) note_failure(status.error(), nullptr);
    return status.ok();
  }

  const CampaignOptions& options_;
  Fleet& fleet_;
  client::ExpertClient& client_;
  std::mt19937_64 random_;
  std::vector<Batch> batches_;  // [kSizes.size() * kBatchesPerSize], by size
  std::array<std::vector<double>, kNumShapes> undisturbed_ms_;
  std::array<int64_t, kNumShapes> usual_ns_{};  // the medians of the baseline
  CampaignReport report_;
};

size_t count_children() {
  size_t count = 0;
  while (::waitpid(-1, nullptr, WNOHANG) >= 0 && count < kNumWorkers) ++count;
  return count;
}

}  // namespace

const char* event_name(EventKind kind) {
  switch (kind) {
    case EventKind::kKill:     return "kill";
    case EventKind::kStop:     return "stop";
    case EventKind::kLoneKill: return "lone kill";
  }
  return "unknown";
}

double CampaignReport::stall_ms(EventKind kind, double fraction) const {
  std::vector<double> stalls;
  for (const StrikeEvent& event : events) {
    if (event.kind == kind) stalls.push_back(event.stall_ms);
  }
  if (stalls.empty()) return 0;
  std::sort(stalls.begin(), stalls.end());
  return stalls[static_cast<size_t>(fraction * static_cast<double>(stalls.size() - 1) + 0.5)];
}

uint64_t CampaignReport::count(EventKind kind) const {
  return static_cast<uint64_t>(std::count_if(
      events.begin(), events.end(), [kind](const StrikeEvent& one) { return one.kind == kind; }));
}

Result<CampaignReport> run_campaign(const CampaignOptions& options) {
  const size_t num_descriptors = open_descriptors().size(), num_before = num_segments();
  client::ClientOptions client_options(kCallTimeoutNs, options.stall_timeout_ns);
  CampaignReport report;
  {
    auto fleet = Fleet::start(options.transport, client_options);
    if (!fleet.ok()) return std::move(fleet).error();
    report = Campaign(options, *fleet.value()).run();
  }
  report.left_processes = count_children();
  report.left_descriptors = open_descriptors().size() - num_descriptors;
  report.left_segments = num_segments() - num_before;
  return report;
}

}  // namespace dflash::failover
