// Whose turn it is to compute. All sessions of a worker compute with the same threads, one at a
// time, and next is whoever has had the least of their time so far, as in start-time fair queueing
// (Goyal, Vin and Cheng, SIGCOMM 1996). A session asks again for each piece of a long request while
// others compute too, so that one that floods its worker takes no more than an equal share of the
// time, in portions of a piece, whatever its experts cost.
//
// Reading an expert's weights takes most of the time of a piece with few rows. So whoever has the
// turn may compute what others wait with as well, if it needs the same weights. Nobody waits for
// company that may come, only, for a small part of a batch's time, for sessions that were in the
// last batch and are known to have more to compute: they are between two of their pieces. Without
// that a session that has just computed would never be among those who are chosen from, so that
// turns would alternate whatever they cost; and one session would compute alone and the others
// without it, by turns for ever.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/timed_wait.h"
#include "compute/experts/expert_layer.h"
#include "compute/yielding_progress.h"

namespace dflash::store {

class ResidentShard;

// What the turns have computed: pieces of one session, or of several at once.
struct BatchCounts {
  uint64_t batches = 0;
  uint64_t rows = 0;      // of all batches
  uint64_t sessions = 0;  // summed over the batches
};

class ComputeTurns {
 public:
  class Turn;

  // What one session has had. It outlives the session's turns.
  class Account {
   public:
    // Whether the session asks again at once when its turn is over. Any thread.
    void set_more(bool has_more) { has_more_.store(has_more, std::memory_order_relaxed); }

   private:
    friend class ComputeTurns;
    int64_t had_ns_ = 0;  // on the scale of virtual_ns_, and guarded as that is
    std::atomic<bool> has_more_{false};
  };

  // Rows of a session that wait for a turn. What it refers to stays as it is meanwhile.
  struct Piece {
    const ResidentShard* shard = nullptr;
    compute::ForwardArgs args;
    bool is_apart = false;  // whether it is to be computed alone

    size_t num_pairs() const { return args.local_expert_ids.size(); }
  };

  // What became of a turn that was asked for.
  enum class Outcome : uint8_t {
    kTurn,      // the asker computes now
    kComputed,  // another session has computed the piece with its own
    kOver,      // the asker was told to stop first
  };

  // How many compute or wait for their turn. Any thread.
  size_t num_asking() const;
  // For how long no two sessions have asked by turns, however often one of them did. Any thread.
  int64_t quiet_ns() const;
  // Of all turns whose piece was named. Any thread.
  BatchCounts counts() const;

 private:
  // The time between two looks at who computes. What a link carries in it waits that long.
  static constexpr int64_t kLookNs = 500'000;
  // The part of a batch's time for which the next one may wait for who was in it. A session takes
  // some 50 us from one piece to its next, and a piece in which weights come from memory
  // milliseconds; where nobody comes after all, 3 % is lost.
  static constexpr int64_t kPartToGather = 32;

  // All of these are called with the mutex held.
  void ask(Turn& turn);
  void line_up(Turn& turn);
  void begin_next();  // if anybody waits; nobody computes
  // The time until somebody who waits has to look again.
  int64_t time_to_look_ns() const;
  // Begins the next turn if those who are expected have asked, or have had their time to.
  void begin_if_gathered();
  void charge(Turn& turn, int64_t ns);

  mutable std::mutex mutex_;
  // All below are guarded by it.
  Turn* computing_ = nullptr;
  std::vector<Turn*> waiting_;  // in the order of their beginning, and then of asking
  // When the turn that was given last begins, on a scale on which each session's turns follow one
  // another without a gap while it waits. A session that comes back begins here: it has neither
  // saved up time nor missed any.
  int64_t virtual_ns_ = 0;
  const Account* last_account_ = nullptr;  // that has asked
  int64_t asked_by_turns_ns_ = 0;          // when last another one than before has
  // Who was in the last batch and has more to compute. They are compared and never read: a session
  // may have ended meanwhile.
  std::vector<const Account*> expected_;
  int64_t expected_until_ns_ = 0;
  BatchCounts counts_;
};

// One turn, from await() until it is destroyed; of one thread.
class ComputeTurns::Turn {
 public:
  // `account` is that of a session; without one, the turn is nobody's.
  explicit Turn(ComputeTurns& turns, Account* account = nullptr)
      : turns_(turns), account_(account == nullptr ? own_ : *account) {}
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  // Waits for the turn, or until another session has computed `piece`, if one is named. Once
  // another one has taken that up, `is_over` waits for the end of its computation. Meanwhile
  // `progress` counts whenever the one who computes has got on, so that a worker whose threads are
  // busy for another host does not look stuck, and one that is stuck does.
  template <class IsOver>
  Outcome await(compute::YieldingProgress& progress, const IsOver& is_over,
                const Piece* piece = nullptr) {
    piece_ = piece;
    count_ = &progress.count();
    std::unique_lock lock(turns_.mutex_);
    turns_.ask(*this);
    const Turn* former = nullptr;
    uint64_t former_count = 0;
    while (place_ == Place::kWaiting || place_ == Place::kTaken) {
      const Turn* const first = turns_.computing_;  // null while the next batch gathers
      const uint64_t count = first == nullptr ? 0 : first->count_->load(std::memory_order_relaxed);
      const bool has_got_on = first != former || count != former_count;
      former = first;
      former_count = count;
      lock.unlock();
      if (has_got_on) progress.count_and_yield();
      const bool gives_up = is_over();
      lock.lock();
      if (gives_up && place_ == Place::kWaiting) {
        give_up();
        return Outcome::kOver;
      }
      if (turns_.computing_ == nullptr) turns_.begin_if_gathered();
      if (place_ == Place::kWaiting || place_ == Place::kTaken)
        wait_for_ns(comes_, lock, turns_.time_to_look_ns());
    }
    return place_ == Place::kComputing ? Outcome::kTurn : Outcome::kComputed;
  }

  // -- for whoever has the turn and named its piece, which may have changed since --
  // Takes up what others wait with, if it needs the same shard, has the same dtypes and, together
  // with the own piece, at most `most_pairs` pairs. Returns the pieces, valid until one of:
  std::span<const Piece* const> take_company(size_t most_pairs);
  // They were computed, with the own piece, in `ns`; their sessions go on.
  void answer_company(int64_t ns);
  // They were not, and their sessions wait again; nobody takes them up any more.
  void refuse_company();

  // -- after the piece was computed, by whomever --
  // Whether others computed before or with it.
  bool was_alone() const { return !has_waited_ && batch_sessions_ == 1; }
  // The part of the time that fell to it, by its pairs.
  int64_t share_ns() const { return share_ns_; }
  uint32_t batch_rows() const { return batch_rows_; }
  uint32_t batch_sessions() const { return batch_sessions_; }

 private:
  friend class ComputeTurns;

  enum class Place : uint8_t { kNone, kWaiting, kTaken, kComputing, kComputed };
  void give_up();  // with the mutex held
  bool fits(const Turn& other) const;

  ComputeTurns& turns_;
  Account own_;
  Account& account_;
  std::condition_variable comes_;
  // Fixed while the turn is asked for.
  const Piece* piece_ = nullptr;
  const std::atomic<uint64_t>* count_ = nullptr;
  // Guarded by the mutex of the turns, and written by whoever computes. The thread of the turn
  // reads them without it after await(), when nobody else has the turn in hand any more.
  Place place_ = Place::kNone;
  bool has_waited_ = false;
  bool was_refused_ = false;  // by whoever had taken the piece up
  int64_t start_ns_ = 0;      // on the scale of virtual_ns_
  int64_t share_ns_ = 0;
  uint32_t batch_rows_ = 0, batch_sessions_ = 0;
  // Of the thread that has the turn.
  int64_t began_ns_ = 0;
  bool is_charged_ = false;
  std::vector<Turn*> company_;
  std::vector<const Piece*> company_pieces_;
};

}  // namespace dflash::store
