/* The functions of the system that open files, for a library that is loaded first and has them fail:
 * each of them calls open_at() below, which whoever includes this defines before.
 * SPDX-License-Identifier: Apache-2.0
 */
#pragma once
#include <fcntl.h>
#include <stdarg.h>
#include <sys/types.h>

#define MODE_OF(flags, mode)             \
  mode_t mode = 0;                       \
  if ((flags) & (O_CREAT | O_TMPFILE)) { \
    va_list more;                        \
    va_start(more, flags);               \
    mode = (mode_t)va_arg(more, int);    \
    va_end(more);                        \
  }
int open(const char* path, int flags, ...) {
  MODE_OF(flags, mode)
  return open_at(AT_FDCWD, path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  MODE_OF(flags, mode)
  return open_at(AT_FDCWD, path, flags, mode);
}
int openat(int folder, const char* path, int flags, ...) {
  MODE_OF(flags, mode)
  return open_at(folder, path, flags, mode);
}
