// Sessions that compute or wait are few (max_sessions), so that each choice looks at all of them.
// SPDX-License-Identifier: Apache-2.0
#include "store/compute_turns.h"

#include <algorithm>
#include <limits>

namespace dflash::store {

size_t ComputeTurns::num_asking() const {
  const std::lock_guard lock(mutex_);
  return waiting_.size() + (computing_ == nullptr ? 0 : 1 + computing_->company_.size());
}

int64_t ComputeTurns::quiet_ns() const {
  const std::lock_guard lock(mutex_);
  if (asked_by_turns_ns_ == 0) return std::numeric_limits<int64_t>::max();
  return now_ns() - asked_by_turns_ns_;
}

BatchCounts ComputeTurns::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void ComputeTurns::ask(Turn& turn) {
  if (&turn.account_ != &turn.own_) {
    if (last_account_ != nullptr && last_account_ != &turn.account_) asked_by_turns_ns_ = now_ns();
    last_account_ = &turn.account_;
  }
  turn.start_ns_ = std::max(turn.account_.had_ns_, virtual_ns_);
  line_up(turn);
  turn.has_waited_ = computing_ != nullptr || !expected_.empty();
  std::erase(expected_, &turn.account_);
  if (computing_ == nullptr) begin_if_gathered();
}

void ComputeTurns::line_up(Turn& turn) {
  turn.place_ = Turn::Place::kWaiting;
  const auto place = std::upper_bound(
      waiting_.begin(), waiting_.end(), turn.start_ns_,
      [](int64_t start_ns, const Turn* other) { return start_ns < other->start_ns_; });
  waiting_.insert(place, &turn);
}

void ComputeTurns::begin_if_gathered() {
  if (!expected_.empty() && now_ns() < expected_until_ns_) return;
  begin_next();
}

int64_t ComputeTurns::time_to_look_ns() const {
  const int64_t gathers_ns = expected_until_ns_ - now_ns();
  return computing_ == nullptr && gathers_ns > 0 ? std::min(gathers_ns, kLookNs) : kLookNs;
}

void ComputeTurns::begin_next() {
  expected_.clear();
  if (waiting_.empty()) return;
  computing_ = waiting_.front();
  waiting_.erase(waiting_.begin());
  virtual_ns_ = std::max(virtual_ns_, computing_->start_ns_);
  computing_->place_ = Turn::Place::kComputing;
  computing_->began_ns_ = now_ns();
  notify_waiter(computing_->comes_);
}

void ComputeTurns::charge(Turn& turn, int64_t ns) { turn.account_.had_ns_ = turn.start_ns_ + ns; }

ComputeTurns::Turn::~Turn() {
  if (place_ != Place::kComputing) return;
  refuse_company();
  const std::lock_guard lock(turns_.mutex_);
  if (!is_charged_) turns_.charge(*this, now_ns() - began_ns_);
  turns_.computing_ = nullptr;
  turns_.begin_if_gathered();
}

void ComputeTurns::Turn::give_up() {
  std::erase(turns_.waiting_, this);
  place_ = Place::kNone;
}

bool ComputeTurns::Turn::fits(const Turn& other) const {
  return other.piece_ != nullptr && !other.piece_->is_apart && !other.was_refused_ &&
         other.piece_->shard == piece_->shard &&
         other.piece_->args.row_dtype == piece_->args.row_dtype &&
         other.piece_->args.reply_dtype == piece_->args.reply_dtype;
}

std::span<const ComputeTurns::Piece* const> ComputeTurns::Turn::take_company(size_t most_pairs) {
  size_t num_pairs = piece_->num_pairs();
  company_pieces_.clear();
  if (piece_->is_apart || num_pairs >= most_pairs) return {};
  const std::lock_guard lock(turns_.mutex_);
  for (Turn* other : turns_.waiting_) {
    if (!fits(*other) || num_pairs + other->piece_->num_pairs() > most_pairs) continue;
    num_pairs += other->piece_->num_pairs();
    other->place_ = Place::kTaken;
    company_.push_back(other);
    company_pieces_.push_back(other->piece_);
  }
  std::erase_if(turns_.waiting_, [](Turn* other) { return other->place_ == Place::kTaken; });
  return company_pieces_;
}

void ComputeTurns::Turn::answer_company(int64_t ns) {
  const std::lock_guard lock(turns_.mutex_);
  size_t num_pairs = piece_->num_pairs(), num_rows = piece_->args.num_rows;
  for (const Turn* other : company_) {
    num_pairs += other->piece_->num_pairs();
    num_rows += other->piece_->args.num_rows;
  }
  const bool gathers = !company_.empty() || !turns_.waiting_.empty();
  const auto end = [&](Turn& turn) {
    if (gathers && turn.account_.has_more_.load(std::memory_order_relaxed))
      turns_.expected_.push_back(&turn.account_);
    const double part = num_pairs == 0 ? 1.0
                                       : static_cast<double>(turn.piece_->num_pairs()) /
                                             static_cast<double>(num_pairs);
    turn.share_ns_ = static_cast<int64_t>(static_cast<double>(ns) * part);
    turn.batch_rows_ = static_cast<uint32_t>(num_rows);
    turn.batch_sessions_ = static_cast<uint32_t>(1 + company_.size());
    turns_.charge(turn, turn.share_ns_);
  };
  end(*this);
  is_charged_ = true;
  turns_.expected_until_ns_ = now_ns() + ns / kPartToGather;
  for (Turn* other : company_) {
    end(*other);
    other->place_ = Place::kComputed;
    notify_waiter(other->comes_);
  }
  ++turns_.counts_.batches;
  turns_.counts_.rows += num_rows;
  turns_.counts_.sessions += 1 + company_.size();
  company_.clear();
}

void ComputeTurns::Turn::refuse_company() {
  if (company_.empty()) return;
  const std::lock_guard lock(turns_.mutex_);
  for (Turn* other : company_) {
    other->was_refused_ = true;
    turns_.line_up(*other);
  }
  company_.clear();
}

}  // namespace dflash::store
