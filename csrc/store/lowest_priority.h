// For threads that read and write beside calls.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace dflash::store {

// Makes the calling thread yield to all others, on the processor and at the disk. Where the system
// does not allow it, the thread goes on all the same.
inline void take_lowest_priority() {
  constexpr int kNice = 19;
  constexpr long kProcess = 1, kIdleClass = 3, kClassShift = 13;  // as linux/ioprio.h has them
  static_cast<void>(::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), kNice));
  static_cast<void>(::syscall(SYS_ioprio_set, kProcess, 0L, kIdleClass << kClassShift));
}

}  // namespace dflash::store
