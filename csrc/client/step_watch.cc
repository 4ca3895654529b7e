// SPDX-License-Identifier: Apache-2.0
#include "client/step_watch.h"

#include <algorithm>
#include <utility>

namespace dflash::client {

StepWatch::StepWatch(std::shared_ptr<ExpertClient> client, const StepLease& lease, int64_t limit_ns,
                     std::string late, std::function<void()> stop)
    : client_(std::move(client)), late_(std::move(late)), stop_(std::move(stop)) {
  clock_.look(now_ns());
  deadline_ns_ = clock_.at_last_look() + limit_ns;
  fds_.push_back({over_.fd(), POLLIN, 0});
  for (const LeasedPath& path : lease.paths) fds_.push_back({path.hangup_fd, POLLRDHUP, 0});
  thread_ = std::thread([this] { watch(); });
}

StepWatch::~StepWatch() {
  is_over_.store(true, std::memory_order_relaxed);
  over_.ring();
  thread_.join();
}

std::optional<Error> StepWatch::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

void StepWatch::watch() {
  while (!is_over_.load(std::memory_order_relaxed)) {
    const int64_t left_ns =
        std::clamp(deadline_ns_ - clock_.at_last_look(), int64_t{0}, kStepLookNs);
    const timespec look{0, static_cast<long>(left_ns)};
    if (::ppoll(fds_.data(), fds_.size(), &look, nullptr) > 0) {
      // A sign of life's end: the socket of some worker's process hung up. Or the client has closed
      // it meanwhile, and another file of this process has its number by now, which says nothing of
      // a worker. judge_step() below knows which it was; poll() is not told of that number again.
      for (size_t i = 1; i < fds_.size(); ++i) {
        if (fds_[i].revents != 0) fds_[i].fd = -1;
      }
    }
    if (!is_over_.load(std::memory_order_relaxed) && must_stop()) return stop_();
  }
}

bool StepWatch::must_stop() {
  Status judged = client_->judge_step();
  clock_.look(now_ns());
  if (judged.ok() && clock_.at_last_look() >= deadline_ns_)
    judged = Error{ErrorCode::kTimeout, late_};
  if (judged.ok()) return false;
  const std::lock_guard lock(mutex_);
  reason_ = std::move(judged).error();
  return true;
}

}  // namespace dflash::client
