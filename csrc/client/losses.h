// When a worker or a call is given up. A worker is by whichever of three grounds comes first: its
// pulse connection ends, its progress counter stands still while it owes something, or it answers
// nothing.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include "client/answers.h"
#include "client/step.h"

namespace dflash::client {

// Nobody is given up for what has arrived and was not looked at: answers are taken first, and time
// in which nobody looked does not count. What a lost worker owed has lost its home at once, and has
// found another holder, waits for one, or has ended its call when lose() returns.
class Losses {
 public:
  Losses(const Crew& crew, Calls& calls, Remedies& remedies, Answers& answers)
      : crew_(crew), calls_(calls), remedies_(remedies), answers_(answers) {}

  // Gives a worker up for an error in which it did not name itself.
  void lose(Link& link, const Error& why);
  // The same after taking the answers that have come.
  void lose_after_drain(Link& link, const std::string& reason);
  void judge(Link& link, int64_t now);
  void judge_all(int64_t now);
  // Judges all where nobody has for one tick.
  void judge_if_due(int64_t real_now);
  // Asks the last holders for the calls whose deadline has passed, or ends them.
  void end_late_calls(int64_t now);
  // Judges the workers of an open step, and all others. What a step asks of one worker it asks of
  // no other, so that a suspected one ends it where another holder can answer the same calls
  // outside of it. Errors: kWorkerLost naming the first worker of the step that is lost, kTimeout
  // naming one that is suspected while others hold all that is asked of it.
  Status judge_step(const OpenStep& step, const std::map<uint32_t, Layer>& layers, int64_t now);

 private:
  void drain(Link& link);
  void judge_silence(Link& link, int64_t now);
  bool await_verdict(Call& call, int64_t now);
  Error late_error(const Call& call) const;

  const Crew& crew_;
  Calls& calls_;
  Remedies& remedies_;
  Answers& answers_;
  int64_t last_judged_ns_ = 0;  // by the machine's clock
};

}  // namespace dflash::client
