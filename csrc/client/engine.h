// The progress engine: it admits calls, sends their slices as credits allow, takes answers, judges
// workers and ends calls. Not thread-safe: whoever has the turn (turn.h) uses it. Its sources are
// engine.cc (calls and sending), engine_answers.cc (what arrives), engine_losses.cc (what is given
// up) and engine_remedies.cc (who is asked instead).
//
// A call is parked, uncut, while a shard that it needs has no holder that can be asked but may have
// one again, or while somebody holds the engine to change something between calls. It is cut and
// sent as soon as it can be, or ends by its deadline. A slice whose worker is lost goes to another
// holder of its shard, and waits for one that is on its way back where there is no other. So does a
// slice that was not answered in its call's time, as long as there is a holder that was not asked.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "client/buffer_pool.h"
#include "client/call.h"
#include "client/combine.h"
#include "client/cut.h"
#include "client/link.h"
#include "client/receive.h"
#include "client/router.h"
#include "client/step.h"
#include "client/types.h"
#include "client/watch_clock.h"

namespace dflash::client {

// A thread that sleeps until a time wakes up to 50 us late where timers are coalesced, and as much
// later where its core was halted. A wait for a reply ends its sleep so long before the reply is
// predicted, and spins from then on.
inline constexpr int64_t kWakeLeadNs = 150'000;
inline constexpr size_t kMaxTraces = 65536;
// A call may take four times what is predicted, but at most this many call timeouts, because
// predictions rest on what workers say.
inline constexpr int64_t kPatience = 4, kMaxPatience = 20;

// The links, layers and calls of one client. Calls are shared with their waiters; all else is owned
// here.
class Engine {
 public:
  explicit Engine(const ClientOptions& options)
      : options_(options), spin_ns_(options.spin_ns), hedge_budget_(options.hedge_share) {
    // Whoever waits no longer for a worker is answered by the last resort, and not by an error.
    options_.reconnect_grace_ns = std::min(options_.reconnect_grace_ns, options_.park_ns);
  }

  // -- workers and layers --
  uint32_t add_worker(NewWorker worker);
  Link* link(uint32_t worker) { return worker < links_.size() ? links_[worker].get() : nullptr; }
  Links links() const { return links_; }
  Status define_layer(const LayerPlan& plan);
  const Layer* layer(uint32_t index) const;
  // Names the holders of a shard, preferred first. Slices that wait at others move. Errors:
  // kInvalidArgument.
  Status set_holders(uint32_t layer, uint32_t shard, const std::vector<uint32_t>& workers);
  void set_admission(Link& link, Admission admission);
  // Says whether somebody brings the worker back if it is lost.
  void set_remedy(Link& link, bool has_remedy);
  bool has_events() const { return !events_.empty(); }
  std::vector<ClientEvent> take_events() { return events_.take(); }

  // -- calls --
  // Returns memory for a new call, with empty lists.
  std::unique_ptr<CallWork> take_work();
  // Takes a routed call: it sends what fits, or parks the call. Errors, with which the call was not
  // taken: kInvalidArgument, kWorkerLost, kClosed.
  Status start(const CallPtr& call);
  // Ends an unfinished call. Its slots in flight are quarantined.
  void fail(Call& call, Error error);
  // How many calls have ended so far. A driver compares it to learn whether sleepers must look
  // again.
  uint64_t num_ended() const { return num_ended_; }
  // How many calls were cut and have not ended.
  size_t num_under_way() const { return calls_.size() - num_parked_; }

  // -- progress --
  // Sleeps until the first event, but at most until `tick` and one kTickNs. Then handles everything
  // that has arrived and sends what fits. `wake_fd` is as in transport::wait_any.
  void drive(Deadline tick, int wake_fd);

  // -- between calls --
  bool is_held() const { return is_held_; }
  // From now on calls are parked.
  void hold() { is_held_ = true; }
  void resume();
  // Nobody renews paths or resumes from now on: parked calls end, and none is taken any more.
  void close();
  bool is_closed() const { return is_closed_; }

  // -- data paths --
  // Gives a worker up, after taking the answers that have come. What it owed is asked of others;
  // calls for which there is nobody else end.
  void lose_after_drain(Link& link, const std::string& reason);
  // Gives the link a fresh path; nothing may be in flight on the old one. Errors: kWorkerLost,
  // kInvalidArgument.
  Status renew_path(Link& link, NewPath path);
  // Takes a lost worker back. Errors: kInvalidArgument.
  Status replace_worker(Link& link, NewPath path, OwnedFd pulse);
  // Wears out every living path that has a slot in quarantine, for a caller who needs all slots.
  void wear_out_unfit();
  // Reads the pulses of a worker, and returns how long ago the last one was read.
  int64_t pulse_age_ns(Link& link);
  // Retires all paths that are worn and idle. The caller then renews them.
  std::vector<WornPath> retire_worn_paths();
  bool has_path_to_retire() const;
  // Retires a path that need not be worn. Errors: kWorkerLost, kInvalidArgument where something is
  // in flight.
  Status retire_path(Link& link, const std::string& reason);

  // -- device steps (step.h) --
  // Whether a step cannot begin yet, but will be able to once calls have ended and paths were
  // renewed.
  bool must_step_wait();
  Result<StepLease> begin_step(uint32_t num_calls);
  // Reads the pulses of the leased paths. Errors: kWorkerLost naming the first worker of the step
  // that is lost, kTimeout naming one that is suspected while others hold all that is asked of it.
  Status judge_step();
  void end_step(const StepResult& result);

  // Whether waits may spin, where the options let them.
  void set_spinning(bool is_allowed) { spin_ns_ = is_allowed ? options_.spin_ns : 0; }

  // -- traces --
  void set_profile(bool on) { is_profiling_ = on; }
  std::vector<SliceTrace> take_traces() { return std::exchange(traces_, {}); }

 private:
  // engine.cc
  Status check_holders(const LayerPlan& plan, const ShardPlace& shard,
                       std::span<const uint32_t> workers) const;
  struct WorstShard {
    Outlook outlook = Outlook::kUsable;
    size_t index = 0;
  };
  WorstShard worst_shard(const Call& call, int64_t now) const;
  void admit_parked();
  void enqueue(Call& call);
  void pump();
  bool send_next(Link& link);
  void send(Link& link, Slice& slice, uint32_t slot, bool is_hedge);
  void finish(Call& call);
  void end(Call& call);
  void trace(const Call& call, const Slice& slice);
  void charge_wait(int64_t elapsed_ns);
  void wait_for_reply(Deadline until, int64_t now, int wake_fd);
  int64_t next_reply_ns() const;
  int64_t next_look_ns() const;
  int64_t limit_ns(int64_t predicted_ns) const;
  int64_t now() const { return clock_.at(now_ns()); }
  // engine_answers.cc
  void take(Link& link, const transport::Arrival& arrival);
  void drain(Link& link);
  void drain_all();
  void take_refusal(Link& link, const Answer& answer);
  void take_rows(Link& link, const Answer& answer);
  void learn(Link& link, const Attempt& attempt, uint64_t reply_bytes);
  // engine_losses.cc
  void lose(Link& link, ErrorCode code, const std::string& reason);
  void judge(Link& link, int64_t now);
  void judge_all(int64_t now);
  void judge_if_due(int64_t real_now);
  void judge_silence(Link& link, int64_t now);
  void end_late_calls(int64_t now);
  bool await_verdict(Call& call, int64_t now);
  Error late_error(const Call& call) const;
  Status check_idle(const Link& link) const;
  // engine_remedies.cc
  std::span<const uint32_t> holders_of(const Slice& slice) const;
  void make_homeless(Slice& slice, const Link& from);
  void rehome(Call& call, int64_t now);
  void rehome_all(int64_t now);
  void rehome_one(Slice& slice, int64_t now);
  Link* find_home(Slice& slice, int64_t now) const;
  void end_parking(Slice& slice, int64_t now);
  Error homeless_error(const Slice& slice) const;
  void move_waiting(Link& link, int64_t now);
  bool can_move(const Slice& slice, const Link& from) const;
  void relieve(Link& link, int64_t now);
  void give(Slice& slice, Link& home, int64_t now);
  bool ask_untried(Call& call, int64_t now);
  Link* find_untried(const Slice& slice) const;
  int64_t hedged_until(const Slice& slice) const;
  void give_up_attempts(Slice& slice);
  void begin_stall(Link& link);
  void hedge_all(int64_t now);
  void hedge(Link& link, uint32_t slot, int64_t now);

  ClientOptions options_;
  int64_t spin_ns_;  // how long a wait spins now
  Events events_;
  std::vector<std::unique_ptr<Link>> links_;
  std::map<uint32_t, Layer> layers_;
  std::vector<CallPtr> calls_;  // those not ended, parked ones among them, as they were submitted
  size_t num_parked_ = 0;
  bool is_held_ = false;
  bool is_closed_ = false;
  uint64_t next_call_id_ = 1;
  uint64_t num_ended_ = 0;
  WatchClock clock_;            // all times named `now` are its own
  int64_t last_judged_ns_ = 0;  // by the machine's clock
  bool has_replicas_ = false;   // whether any shard has, or had, several holders
  size_t num_homeless_ = 0;     // slices of calls under way
  // When an attempt will be late, by the watch clock; max() where none can be, 0 to look at once.
  int64_t next_hedge_ns_ = std::numeric_limits<int64_t>::max();
  HedgeBudget hedge_budget_;
  OpenStep step_;
  Cutter cutter_;
  Combiner combiner_;
  BufferPool reply_buffers_;
  std::vector<transport::WaitEntry> wait_entries_;      // [num_workers], used again by each drive()
  std::vector<std::unique_ptr<CallWork>> spare_works_;  // those of ended calls
  std::vector<Link*> sending_order_;                    // used again by each pump()
  bool is_profiling_ = false;
  std::vector<SliceTrace> traces_;
};

}  // namespace dflash::client
