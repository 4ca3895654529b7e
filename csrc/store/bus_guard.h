// Keeps a process alive that touches a page of a mapped file which cannot be read: the file has
// been cut off, or its disk fails. The kernel says so by SIGBUS, which ends a process, and with a
// host everything that it serves. Here such a page becomes one of zeros, and is counted; whoever
// computes from the file looks at the count before using the result.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash::store {

// Guards one mapping from its construction to its destruction. The handler of SIGBUS is installed
// with the first one and stays. A fault elsewhere goes to the handler that was there before, which
// by default ends the process. A program that installs a handler of its own later has to hand on
// what is not its own; otherwise a page that cannot be read ends the process, as without this.
class BusGuard {
 public:
  // [base, base + num_bytes) is mapped read-only and whole pages; it stays mapped meanwhile.
  BusGuard(std::byte* base, size_t num_bytes);
  ~BusGuard();
  BusGuard(const BusGuard&) = delete;
  BusGuard& operator=(const BusGuard&) = delete;

  // How many pages were replaced so far. Any thread.
  uint64_t num_faults() const;
  // Whether there are replaced pages; they stay so until the owner maps the file anew, and calls
  // take_torn() before. Any thread.
  bool take_torn();
  void put_back_torn();

  struct Range;

 private:
  Range* const range_;
};

}  // namespace dflash::store
