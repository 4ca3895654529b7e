// Who may delete an object that has threads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

namespace dflash::bindings {

// Deletes an object only in the process that made it. A forked child has a copy of the object but
// not of its threads, and joining them there would never end.
struct DeleteInOwnProcess {
  pid_t owner = ::getpid();
  template <class T>
  void operator()(T* object) const {
    if (::getpid() == owner) delete object;
  }
};

}  // namespace dflash::bindings
