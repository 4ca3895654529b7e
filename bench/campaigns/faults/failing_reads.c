/* Has a disk fail below a process: every call of one function for one file ends in EIO as long as
 * another file exists. Loaded by LD_PRELOAD (bench/campaigns/faults/failing_disk.py compiles it).
 *
 *   DFLASH_BAD_FILE   the file whose disk fails
 *   DFLASH_BAD_TOKEN  the other one, which has the name of the function: open, read, pread, mmap;
 *                     pread fails from the middle of the file on
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Returns whether the token names this function. */
static int is_named(const char* token, const char* call) {
  char named[16] = "";
  const int fd = (int)syscall(SYS_openat, AT_FDCWD, token, O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return 0;
  syscall(SYS_read, fd, named, sizeof named - 1);
  close(fd);
  return strcmp(named, call) == 0;
}

/* Errors of the own look change nothing for the caller. */
static int fails(const char* call, int fd, const char* path, off_t end) {
  const char *file = getenv("DFLASH_BAD_FILE"), *token = getenv("DFLASH_BAD_TOKEN");
  const int error_before = errno;
  struct stat bad, found;
  const int is_bad = file && token && is_named(token, call) && stat(file, &bad) == 0 &&
                     (path ? stat(path, &found) : fstat(fd, &found)) == 0 &&
                     bad.st_ino == found.st_ino && bad.st_dev == found.st_dev &&
                     (end < 0 || end > bad.st_size / 2);
  errno = error_before;
  return is_bad;
}

ssize_t read(int fd, void* bytes, size_t length) {
  if (fails("read", fd, NULL, -1)) return errno = EIO, -1;
  return syscall(SYS_read, fd, bytes, length);
}
ssize_t pread(int fd, void* bytes, size_t length, off_t offset) {
  if (fails("pread", fd, NULL, offset + (off_t)length)) return errno = EIO, -1;
  return syscall(SYS_pread64, fd, bytes, length, offset);
}
ssize_t pread64(int fd, void* bytes, size_t length, off_t offset) {
  return pread(fd, bytes, length, offset);
}
void* mmap(void* at, size_t length, int rights, int flags, int fd, off_t offset) {
  if (fd >= 0 && fails("mmap", fd, NULL, -1)) return errno = EIO, MAP_FAILED;
  return (void*)syscall(SYS_mmap, at, length, rights, flags, fd, offset);
}
void* mmap64(void* at, size_t length, int rights, int flags, int fd, off_t offset) {
  return mmap(at, length, rights, flags, fd, offset);
}

static int open_at(int folder, const char* path, int flags, mode_t mode) {
  if (fails("open", -1, path, -1)) return errno = EIO, -1;
  return (int)syscall(SYS_openat, folder, path, flags, mode);
}
#include "open_calls.h"
