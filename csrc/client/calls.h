// The calls of a client from submit to end: how they wait, are cut, add up their replies and end.
//
// A call is parked, uncut, while a shard that it needs has no holder that can be asked but may have
// one again, or while somebody holds the client to change something between calls. It is cut as
// soon as it can be, or ends by its deadline.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "client/cut.h"
#include "client/router.h"

namespace dflash::client {

inline constexpr size_t kMaxTraces = 65536;
// A call may take four times what is predicted, but at most this many call timeouts, because
// predictions rest on what workers say.
inline constexpr int64_t kPatience = 4, kMaxPatience = 20;

// The last step of a call. The replies of all shards are added per token in ascending shard id, in
// float32 from +0, and each sum is rounded once. It keeps its scratch memory between calls.
class Combiner {
 public:
  // Writes the batch's output [num_tokens, out_size]; a token without an expert gets +0. All slices
  // must have arrived. Errors: kRange naming layer and token where a sum does not fit the output's
  // dtype.
  Status combine(const Call& call);

 private:
  // Where the next row of one shard is, in token order across its slices.
  struct Cursor {
    const ShardRows* rows;
    const Slice* slice;
    uint32_t row;
    // Returns the reply row of `token`, or null where the shard has none. Tokens must be asked for
    // in ascending order.
    const std::byte* take(uint32_t token, size_t out_size);
  };
  std::vector<Cursor> cursors_;  // one for each shard with rows, in ascending shard id
  std::vector<float> sums_;      // [out_size], the sums of one token
};

// Every call that was taken ends once, with its output or with an error. Until then it is listed
// here, and afterwards no link and no path knows a slice of it: what is still owed for it keeps its
// slot in quarantine (path.h). Calls are shared with their waiters.
class Calls {
 public:
  // Answers take their rows' memory from `reply_buffers`; a call that ends gives it back.
  Calls(const Crew& crew, BufferPool& reply_buffers) : crew_(crew), reply_buffers_(reply_buffers) {}

  // Returns memory for a new call, with empty lists.
  std::unique_ptr<CallWork> take_work();
  // Takes a routed call, and cuts or parks it. Errors, with which the call was not taken:
  // kInvalidArgument, kWorkerLost, kClosed.
  Status start(const CallPtr& call, int64_t real_now);
  // Cuts every parked call whose shards have become usable, in the order of submission, and ends
  // those that have waited in vain.
  void admit_parked();
  // One more slice of the call has arrived. The call may be done and gone afterwards.
  void count_arrival(Call& call) {
    if (--call.work->slices_left == 0) finish(call);
  }
  // Ends an unfinished call. Its slots in flight are quarantined.
  void fail(Call& call, Error error);
  // From now on calls are parked, until resume().
  void hold() { is_held_ = true; }
  void resume() { is_held_ = false; }
  // Nobody renews paths or resumes from now on: calls that wait for that end, and none is taken.
  void close();

  // -- slices without a worker --
  // Takes a slice that nobody works at any more from its worker.
  void make_homeless(Slice& slice, const Link& from);
  bool has_homeless() const { return num_homeless_ > 0; }
  // Puts a slice first among those that wait for a worker, which gets as much time as the first one
  // had.
  void give(Slice& slice, Link& home, int64_t now);

  // -- deadlines --
  // How long something may take for which so much is predicted.
  int64_t limit_ns(int64_t predicted_ns) const;
  // The latest deadline that the call may get.
  int64_t latest_ns(const Call& call) const {
    return call.asked_ns + kMaxPatience * crew_.options.call_timeout_ns;
  }
  // Gives the call time `until` then, within the patience of a call.
  void extend(Call& call, int64_t until) const {
    call.deadline_ns = std::max(call.deadline_ns, std::min(until, latest_ns(call)));
  }

  std::span<const CallPtr> all() const { return calls_; }  // as they were submitted
  // How many calls were cut and have not ended.
  size_t num_under_way() const { return calls_.size() - num_parked_; }
  uint64_t num_ended() const { return num_ended_; }
  bool is_held() const { return is_held_; }
  bool is_closed() const { return is_closed_; }
  // Returns the first of so many ids that no other call has.
  uint64_t take_ids(uint32_t count) { return std::exchange(next_id_, next_id_ + count); }
  void set_profile(bool on) { is_profiling_ = on; }
  std::vector<SliceTrace> take_traces() { return std::exchange(traces_, {}); }

 private:
  struct WorstShard {
    Outlook outlook = Outlook::kUsable;
    size_t index = 0;
  };
  WorstShard worst_shard(const Call& call, int64_t now) const;
  Status cut(Call& call, int64_t real_now);
  void finish(Call& call);
  void end(Call& call);
  void trace(const Call& call, const Slice& slice);

  const Crew& crew_;
  BufferPool& reply_buffers_;
  std::vector<CallPtr> calls_;  // those not ended, parked ones among them
  size_t num_parked_ = 0;
  size_t num_homeless_ = 0;  // slices of calls under way
  bool is_held_ = false;
  bool is_closed_ = false;
  uint64_t next_id_ = 1;
  uint64_t num_ended_ = 0;
  Cutter cutter_;
  Combiner combiner_;
  std::vector<std::unique_ptr<CallWork>> spare_works_;  // those of ended calls
  bool is_profiling_ = false;
  std::vector<SliceTrace> traces_;
};

}  // namespace dflash::client
