// The queue of events and the life of tasks.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/scheduler.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/result.h"

namespace dflash::simulation {
namespace {

// The worker's loop and the client's engine need a few KiB, sanitizers several times that.
constexpr size_t kStackBytes = 256 * 1024;

constexpr uint32_t kMostWaits = 20'000;  // a drained backlog takes some hundreds
// Events at one time. No seed of a hundred hours had as many.
constexpr uint32_t kMostAtOnce = 1'000'000;
constexpr int64_t kSpinStepNs = 10'000'000;  // by which time goes on for somebody who spins

thread_local Scheduler* current_scheduler = nullptr;

size_t page_bytes() { return static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }

}  // namespace

Stack::Stack() {
  void* mapped = ::mmap(nullptr, kStackBytes + page_bytes(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  check(mapped != MAP_FAILED, "no memory for the stack of a simulated thread");
  check(::mprotect(mapped, page_bytes(), PROT_NONE) == 0, "cannot guard a simulated stack");
  mapping_ = static_cast<std::byte*>(mapped);
}
Stack::~Stack() { ::munmap(mapping_, kStackBytes + page_bytes()); }
std::byte* Stack::base() const { return mapping_ + page_bytes(); }
size_t Stack::num_bytes() const { return kStackBytes; }

Task::Task(Scheduler& scheduler, std::function<void()> body)
    : scheduler_(scheduler), body_(std::move(body)) {
  if (scheduler.spare_stacks_.empty()) {
    stack_ = std::make_unique<Stack>();
  } else {
    stack_ = std::move(scheduler.spare_stacks_.back());
    scheduler.spare_stacks_.pop_back();
  }
  fibre_.prepare(stack_->base(), stack_->num_bytes(), &Task::enter, this);
}

Task::~Task() { check(is_over_, "a simulated thread was destroyed while it ran"); }

void Task::enter(void* self) {
  Task& task = *static_cast<Task*>(self);
  task.body_();
  task.is_over_ = true;
  task.fibre_.yield_last();
}

void Task::resume() {
  if (is_over_ || !is_sleeping_ || (is_frozen_ && !is_killed_)) return;
  is_sleeping_ = false;
  Task* const former = std::exchange(scheduler_.running_, this);
  fibre_.resume();
  scheduler_.running_ = former;
  if (is_over_) scheduler_.spare_stacks_.push_back(std::move(stack_));
}

void Task::resume_after(uint64_t sleep) {
  if (sleep == num_sleeps_) resume();
}

void Task::sleep_until(int64_t when_ns) {
  if (!is_killed_) await_another(when_ns);
}

void Task::await_another(int64_t when_ns) {
  check(scheduler_.running_ == this, "a simulated thread sleeps while another one runs");
  ++num_sleeps_;
  scheduler_.at(when_ns, [this, sleep = num_sleeps_] { resume_after(sleep); });
  is_sleeping_ = true;
  fibre_.yield();
}

void Task::wake() {
  if (is_over_ || !is_sleeping_) return;
  scheduler_.after(0, [this, sleep = num_sleeps_] { resume_after(sleep); });
}

void Task::thaw() {
  is_frozen_ = false;
  wake();
}

void Task::kill() {
  is_killed_ = true;
  wake();
}

Scheduler::Scheduler() = default;
Scheduler::~Scheduler() = default;

Scheduler& Scheduler::current() {
  check(current_scheduler != nullptr, "simulated time was asked for outside of a simulation");
  return *current_scheduler;
}
bool Scheduler::is_running() { return current_scheduler != nullptr; }

void Scheduler::at(int64_t when_ns, std::function<void()> action) {
  events_.push_back({std::max(when_ns, now_ns_), num_events_++, std::move(action)});
  std::push_heap(events_.begin(), events_.end(), std::greater<>());
}

std::unique_ptr<Task> Scheduler::spawn(std::function<void()> body) {
  auto task = std::make_unique<Task>(*this, std::move(body));
  task->wake();
  return task;
}

bool Scheduler::run(const std::function<bool()>& is_over) {
  Scheduler* const former = std::exchange(current_scheduler, this);
  uint32_t num_at_once = 0;
  while (!is_over() && !events_.empty()) {
    std::pop_heap(events_.begin(), events_.end(), std::greater<>());
    Event event = std::move(events_.back());
    events_.pop_back();
    if (event.when_ns > now_ns_) num_waits_ = num_at_once = 0;
    check(++num_at_once < kMostAtOnce, "simulated tasks wake each other while time stands still");
    now_ns_ = event.when_ns;
    event.action();
  }
  current_scheduler = former;
  return is_over();
}

void Scheduler::count_wait() {
  if (++num_waits_ < kMostWaits) return;
  num_waits_ = 0;
  if (on_spin) on_spin();
  running_->sleep_until(now_ns_ + kSpinStepNs);
}

void Scheduler::watch(int fd, std::shared_ptr<const bool> is_hung_up) {
  const auto index = static_cast<size_t>(fd);
  if (index >= hung_up_.size()) hung_up_.resize(index + 1);
  hung_up_[index] = std::move(is_hung_up);
}

// What an event held may ask for an event when it is freed, such as a channel that closes.
void Scheduler::drop_events() {
  while (!events_.empty()) std::exchange(events_, {}).clear();
}

}  // namespace dflash::simulation
