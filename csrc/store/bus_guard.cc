// The handler of SIGBUS and the list of mappings in which it replaces pages.
// SPDX-License-Identifier: Apache-2.0
#include "store/bus_guard.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <mutex>

namespace dflash::store {

// One mapping. The handler may look at the list at any moment, so that its links never change and
// no entry is freed; an entry that has no mapping any more serves another one.
struct BusGuard::Range {
  std::atomic<uintptr_t> first{0};  // 0 while it is free
  std::atomic<uintptr_t> end{0};
  std::atomic<uint64_t> num_faults{0};
  std::atomic<bool> is_torn{false};
  Range* next = nullptr;
};

namespace {

std::mutex mutex;  // over taking and freeing entries
std::atomic<BusGuard::Range*> ranges{nullptr};
struct sigaction former;
uintptr_t page_bytes = 0;

void end_or_hand_on(int signal, siginfo_t* info, void* context) {
  if ((former.sa_flags & SA_SIGINFO) != 0) return former.sa_sigaction(signal, info, context);
  if (former.sa_handler == SIG_IGN && info->si_code <= 0) return;  // somebody sent it
  if (former.sa_handler != SIG_DFL && former.sa_handler != SIG_IGN)
    return former.sa_handler(signal);
  // The instruction is repeated when this returns, and the process ends as it would have.
  ::sigaction(signal, &former, nullptr);
  if (info->si_code <= 0) ::raise(signal);
}

// Calls nothing but mmap, which is a plain system call here.
void on_bus_error(int signal, siginfo_t* info, void* context) {
  const int error_before = errno;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (auto* range = ranges.load(std::memory_order_acquire); info->si_code > 0 && range != nullptr;
       range = range->next) {
    const uintptr_t first = range->first.load(std::memory_order_acquire);
    if (first == 0 || address < first || address >= range->end.load(std::memory_order_acquire))
      continue;
    // The fault is counted before zeros take the page's place: whoever reads such zeros, and looks
    // at the count afterwards, finds it raised.
    range->num_faults.fetch_add(1, std::memory_order_acq_rel);
    range->is_torn.store(true, std::memory_order_release);
    void* page = reinterpret_cast<void*>(address / page_bytes * page_bytes);
    const bool is_replaced = ::mmap(page, page_bytes, PROT_READ,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
    errno = error_before;
    if (is_replaced) return;
    break;
  }
  end_or_hand_on(signal, info, context);
}

void install() {
  page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  struct sigaction action{};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  ::sigaction(SIGBUS, &action, &former);
}

}  // namespace

BusGuard::BusGuard(std::byte* base, size_t num_bytes)
    : range_([&] {
        const std::lock_guard lock(mutex);
        if (page_bytes == 0) install();
        Range* free = ranges.load(std::memory_order_relaxed);
        while (free != nullptr && free->first.load(std::memory_order_relaxed) != 0)
          free = free->next;
        const bool is_new = free == nullptr;
        if (is_new) free = new Range;
        const auto first = reinterpret_cast<uintptr_t>(base);
        free->is_torn.store(false, std::memory_order_relaxed);
        free->end.store(first + num_bytes, std::memory_order_relaxed);
        free->first.store(first, std::memory_order_release);
        if (is_new) {
          free->next = ranges.load(std::memory_order_relaxed);
          ranges.store(free, std::memory_order_release);
        }
        return free;
      }()) {}

BusGuard::~BusGuard() {
  const std::lock_guard lock(mutex);
  range_->first.store(0, std::memory_order_release);
}

uint64_t BusGuard::num_faults() const { return range_->num_faults.load(std::memory_order_acquire); }
bool BusGuard::take_torn() { return range_->is_torn.exchange(false, std::memory_order_acq_rel); }
void BusGuard::put_back_torn() { range_->is_torn.store(true, std::memory_order_release); }

}  // namespace dflash::store
