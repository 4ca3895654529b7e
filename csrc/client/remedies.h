// Who is asked instead: slices that lost their worker find another holder, wait for one, or end
// their call; slices that are late are asked of a second holder as well.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "client/sending.h"

namespace dflash::client {

// A slice is asked of one holder at a time and at most of one more, never again of one that refused
// it or used up its call's time, and not for ever: its holders are few, its attempts are counted,
// and its call's deadline never moves beyond Calls::latest_ns().
class Remedies {
 public:
  // `late_watch` says when hedge_all() is due.
  Remedies(const Crew& crew, Calls& calls, Sending& sending, LateWatch& late_watch)
      : crew_(crew),
        calls_(calls),
        sending_(sending),
        late_watch_(late_watch),
        hedge_budget_(crew.options.hedge_share) {}

  // Gives every slice without a worker to another holder. One that has none waits for a holder that
  // is on its way back, or ends its call.
  void rehome_all(int64_t now);
  // Moves what waits at a worker that should not be asked to those that should.
  void move_waiting(Link& link, int64_t now);
  // Asks others for all that is asked of a worker which answers nothing. They need not have a free
  // credit, as for a second request: nobody counts on this worker's answer any more.
  void relieve(Link& link, int64_t now);
  // Sends second requests for what is late. It ends early where a link is broken, and is to be
  // called again once that one was given up.
  std::optional<BrokenLink> hedge_all(int64_t now);
  void look_at_once() { late_watch_.look_at_once(); }
  // A slice has arrived, which earns a share of a second request.
  void earn() { hedge_budget_.earn(); }
  // At a call's deadline its unanswered attempts have failed, as if they had been refused. Returns
  // whether every slice has a holder that was not asked yet; they are asked then, or once the path
  // to them is renewed, and the call has a later deadline.
  bool ask_untried(Call& call, int64_t now);
  // Says what happened to a slice, and how those were lost that could not even be asked.
  Error homeless_error(const Slice& slice) const;

 private:
  void rehome(Slice& slice, int64_t now);
  Link* find_home(Slice& slice, int64_t now) const;
  void end_parking(Slice& slice, int64_t now);
  bool can_move(const Slice& slice, const Link& from) const;
  Link* find_second(const Link& link, const Attempt& attempt, int64_t now);
  int64_t hedged_until(const Slice& slice) const;
  Link* find_untried(const Slice& slice) const;
  void give_up_attempts(Slice& slice);

  const Crew& crew_;
  Calls& calls_;
  Sending& sending_;
  LateWatch& late_watch_;
  HedgeBudget hedge_budget_;
};

}  // namespace dflash::client
