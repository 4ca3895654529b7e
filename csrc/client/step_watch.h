// Watches the workers of an open device step with a thread of its own, because the thread that
// queues the step may be busy or wait inside of the caller's framework. The device itself cannot
// see that a process has died, or that time is up.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <poll.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "client/expert_client.h"
#include "client/liveness.h"
#include "client/turn.h"

namespace dflash::client {

// How often the workers' progress and the deadline are looked at. The end of a worker's process
// wakes the thread at once.
inline constexpr int64_t kStepLookNs = 5'000'000;

class StepWatch {
 public:
  // From here on the step of `lease` is watched. As soon as one of its workers is lost or
  // `limit_ns` have passed, `stop` is called once, by the thread, and must make the device give the
  // step up. `late` is then the error's text where the limit was it. Time in which the process was
  // stopped does not count.
  StepWatch(std::shared_ptr<ExpertClient> client, const StepLease& lease, int64_t limit_ns,
            std::string late, std::function<void()> stop);
  // Returns once `stop` does not run and will not any more.
  ~StepWatch();
  StepWatch(const StepWatch&) = delete;
  StepWatch& operator=(const StepWatch&) = delete;

  // Why the step was stopped; none as long as it goes on. Any thread may ask.
  std::optional<Error> reason() const;

 private:
  void watch();
  bool must_stop();

  const std::shared_ptr<ExpertClient> client_;
  const std::string late_;
  const std::function<void()> stop_;
  Bell over_;                // rung once, at the end
  std::vector<pollfd> fds_;  // over_, then the ends of the workers
  WatchClock clock_;         // of the thread, once it runs
  int64_t deadline_ns_ = 0;  // by that clock
  std::atomic<bool> is_over_ = false;
  mutable std::mutex mutex_;
  std::optional<Error> reason_;  // guarded by mutex_
  std::thread thread_;           // the last member, because it uses the others
};

}  // namespace dflash::client
