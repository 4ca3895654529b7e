// Keeps a thread's clock and the names of operators, see operator_clock.h.
// SPDX-License-Identifier: Apache-2.0
#include "base/operator_clock.h"

#include <iterator>
#include <memory>

#include "base/clock.h"

namespace dflash {
namespace {

constexpr const char* kNames[] = {
    "outside",         "embedding",     "norm",        "linear",        "rotary",
    "append",          "attention",     "route",       "activation",    "add",
    "argmax",          "choice",        "expert call", "expert groups", "expert rows",
    "expert gate, up", "expert encode", "expert down"};
static_assert(std::size(kNames) == static_cast<size_t>(Operator::kExpertDown) + 1);

// Owns what `running_` names, which is apart because operators read it without a guard.
thread_local std::unique_ptr<OperatorClock> owned;

}  // namespace

constinit thread_local OperatorClock* OperatorClock::running_ = nullptr;

const char* operator_name(Operator which) { return kNames[static_cast<size_t>(which)]; }

OperatorClock::OperatorClock()
    : current_(&times_[Key(Operator::kOutside, nullptr)]), since_ns_(now_ns()) {}

void OperatorClock::start() {
  owned.reset(new OperatorClock());
  running_ = owned.get();
}

std::vector<OperatorTimes> OperatorClock::stop() {
  if (running_ == nullptr) return {};
  running_->go_to(nullptr, now_ns());
  running_ = nullptr;
  std::vector<OperatorTimes> found;
  for (const auto& [key, times] : owned->times_) found.push_back(times);
  owned.reset();
  return found;
}

void OperatorClock::go_to(OperatorTimes* next, int64_t now) {
  current_->own_ns += now - since_ns_;
  since_ns_ = now;
  current_ = next;
}

OperatorTimes* OperatorClock::enter(Operator which, const void* subject) {
  // Taken first: what looking up costs is the operator's, so that it never counts as Python's.
  const int64_t now = now_ns();
  OperatorTimes* const before = current_;
  OperatorTimes* const next = &times_[Key(which, subject)];
  next->which = which;
  next->subject = subject;
  ++next->num_calls;
  go_to(next, now);
  return before;
}

void OperatorClock::leave(OperatorTimes* before) { go_to(before, now_ns()); }

}  // namespace dflash
