// Virtual time, and the fibres that live in it. Time stands still while code runs and jumps from
// event to event, so that an hour of idle waiting costs nothing, and a run depends on nothing but
// its seed. Real code enters here through the functions of base/clock.h and transport::wait_any,
// which virtual_time.cc defines anew.
//
// One thread runs a whole simulation; several threads may run one each.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <queue>
#include <string>
#include <vector>

#include "base/fibre.h"

namespace dflash::simulation {

class Scheduler;

// Memory that a fibre runs on, with a page below it that no one may touch.
class Stack {
 public:
  Stack();
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  std::byte* base() const;
  size_t num_bytes() const;

 private:
  std::byte* mapping_;
};

// A thread of a simulated process. Code that runs on it gives way in sleep_until() and
// await_another() only.
class Task {
 public:
  Task(Scheduler& scheduler, std::function<void()> body);
  ~Task();
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  // Called by this task: gives way until a time, or until somebody wakes it. A task that was killed
  // goes on at once and gives way no more.
  void sleep_until(int64_t when_ns);
  // The same for what another task of the process has to do first. A task that was killed gives way
  // here too, and for as long: the other one may have been killed with it and needs its chance to
  // return, or both wait for a time, which would never come if this one went on at once.
  void await_another(int64_t when_ns);
  // Called by others. The task goes on at the current time, if it sleeps and is not frozen.
  void wake();
  // As SIGSTOP and SIGCONT: nothing of the task runs in between.
  void freeze() { is_frozen_ = true; }
  void thaw();
  // As SIGKILL, in so far as nothing that the task does afterwards may have an effect: its channels
  // swallow what it sends, and every wait fails at once, so that its code returns and frees what it
  // holds.
  void kill();

  bool is_frozen() const { return is_frozen_; }
  bool is_killed() const { return is_killed_; }
  bool is_over() const { return is_over_; }

 private:
  friend class Scheduler;
  static void enter(void* self);
  void resume();
  void resume_after(uint64_t sleep);

  Scheduler& scheduler_;
  std::function<void()> body_;
  std::unique_ptr<Stack> stack_;
  Fibre fibre_;
  uint64_t num_sleeps_ = 0;  // numbers the sleeps, so that a timer of a former one is ignored
  bool is_sleeping_ = true;  // a new task sleeps until its first event
  bool is_frozen_ = false, is_killed_ = false, is_over_ = false;
};

class Scheduler {
 public:
  Scheduler();
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // The scheduler whose run() is under way on this thread. The seams have no other way to find it,
  // because the real code calls them without knowing that time is simulated.
  static Scheduler& current();
  static bool is_running();

  int64_t now_ns() const { return now_ns_; }
  Task* running() const { return running_; }  // null while an event runs outside of tasks

  void at(int64_t when_ns, std::function<void()> action);
  void after(int64_t delay_ns, std::function<void()> action) {
    at(now_ns_ + delay_ns, std::move(action));
  }
  // Starts a task at the current time. It must be over when it is destroyed, and must not be
  // destroyed before the last run() has returned, because timers may still name it.
  std::unique_ptr<Task> spawn(std::function<void()> body);
  // Runs event after event until `is_over` says so. Returns false if no event is left before.
  bool run(const std::function<bool()>& is_over);

  // Counts the waits of code that spins instead of sleeping: in virtual time it would spin for
  // ever. After too many of them at one time, `on_spin` is told, and time goes on for the running
  // task.
  void count_wait();
  std::function<void()> on_spin;

  // Whether the other end of a watched socket is closed, which the kernel need not be asked: a
  // simulation closes both ends itself. `is_hung_up` is set when it does.
  void watch(int fd, std::shared_ptr<const bool> is_hung_up);
  bool has_hung_up(int fd) const {
    const auto index = static_cast<size_t>(fd);
    return index < hung_up_.size() && hung_up_[index] != nullptr && *hung_up_[index];
  }

  // Forgets what was still to happen, so that whatever events held is freed while all else exists.
  void drop_events();

  uint64_t num_events() const { return num_events_; }

 private:
  friend class Task;
  struct Event {
    int64_t when_ns;
    uint64_t number;  // events of one time happen in the order in which they were asked for
    std::function<void()> action;
    bool operator>(const Event& other) const {
      return when_ns != other.when_ns ? when_ns > other.when_ns : number > other.number;
    }
  };

  // A clock that began in the past, so that no time is 0, which real code takes for "never".
  int64_t now_ns_ = 1'000'000'000;
  uint64_t num_events_ = 0;
  uint32_t num_waits_ = 0;  // at the current time
  Task* running_ = nullptr;
  std::vector<Event> events_;                         // a heap, the next one first
  std::vector<std::shared_ptr<const bool>> hung_up_;  // by descriptor
  std::vector<std::unique_ptr<Stack>> spare_stacks_;
};

}  // namespace dflash::simulation
