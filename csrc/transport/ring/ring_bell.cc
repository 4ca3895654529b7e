// The bell's thread. It takes the place of the wake-up that a publishing processor would make.
// SPDX-License-Identifier: Apache-2.0
#include "transport/ring/ring_bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <utility>

#include "transport/ring/layout.h"

namespace dflash::transport {
namespace {

uint32_t load(std::byte* base, uint64_t offset) {
  return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(base + offset))
      .load(std::memory_order_seq_cst);
}

void wake(std::byte* own) {
  ::syscall(SYS_futex, own + kHeadOffset, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void pause(int64_t nap_ns) {
  if (nap_ns > 0) {
    const timespec nap{0, static_cast<long>(nap_ns)};
    ::nanosleep(&nap, nullptr);
    return;
  }
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

RingBell::RingBell(std::vector<RingView> rings, int64_t nap_ns)
    : rings_(std::move(rings)), thread_([this, nap_ns] { watch(nap_ns); }) {}

RingBell::~RingBell() {
  is_over_.store(true, std::memory_order_relaxed);
  thread_.join();
}

// A head that has moved is told to the worker once. Either the worker sleeps already and is woken.
// Or it stores its sleeping word after this look and reads the head after that store, so that it
// sees the message by itself: this is the ring's Dekker pair with the device's store in the place
// of the publisher's.
void RingBell::watch(int64_t nap_ns) {
  std::vector<uint32_t> told;
  for (const RingView& ring : rings_) told.push_back(ring.head);
  for (bool is_last = false; !is_last;) {
    is_last = is_over_.load(std::memory_order_relaxed);
    for (size_t i = 0; i < rings_.size(); ++i) {
      const uint32_t head = load(rings_[i].own, kHeadOffset);
      if (head == told[i]) continue;
      told[i] = head;
      if (load(rings_[i].peer, kSleepingOffset) == static_cast<uint32_t>(SleepState::kFutex))
        wake(rings_[i].own);
    }
    if (!is_last) pause(nap_ns);
  }
}

}  // namespace dflash::transport
