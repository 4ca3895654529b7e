/* Has the n-th call of one function of a process fail: loaded by LD_PRELOAD
 * (bench/campaigns/faults/failing_calls.py compiles it).
 *
 *   fault_arm(KIND, N)    the N-th call from now on fails once; 0 takes that back
 *   fault_seen(KIND)      calls since the last fault_arm
 *
 * A worker is armed at its start by DFLASH_FAIL=KIND:N in its environment, where it is the one that
 * takes away the file named by DFLASH_FAIL_TOKEN. Of allocations and mappings only those of the
 * core count, its own and those of its C++ library: the interpreter's are not ours.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MALLOC, MMAP, MEMFD, EVENTFD, SEND, RECV, OPEN, THREAD, KINDS };
enum { MOST_RANGES = 16 };

static atomic_long left[KINDS], seen[KINDS];
static struct {
  uintptr_t first, last;
} ranges[MOST_RANGES];
static atomic_int num_ranges;
static int (*real_thread)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);

static int fails(int kind) {
  atomic_fetch_add(&seen[kind], 1);
  return atomic_load(&left[kind]) > 0 && atomic_fetch_sub(&left[kind], 1) == 1;
}

static int add_range(struct dl_phdr_info* info, size_t size, void* unused) {
  (void)size, (void)unused;
  if (!strstr(info->dlpi_name, "/_core.") && !strstr(info->dlpi_name, "libstdc++")) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const int next = atomic_load(&num_ranges);
    if (info->dlpi_phdr[i].p_type != PT_LOAD || next == MOST_RANGES) continue;
    ranges[next].first = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
    ranges[next].last = ranges[next].first + info->dlpi_phdr[i].p_memsz;
    atomic_store(&num_ranges, next + 1);
  }
  return 0;
}

/* Finds the core once it is loaded, which it is not when a worker is armed. */
static void find_core(void) {
  if (atomic_load(&num_ranges) == 0) dl_iterate_phdr(add_range, NULL);
}

void fault_arm(int kind, long n) {
  find_core();
  atomic_store(&seen[kind], 0);
  atomic_store(&left[kind], n);
}

long fault_seen(int kind) { return atomic_load(&seen[kind]); }

__attribute__((constructor)) static void begin(void) {
  real_thread = (int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*))dlsym(
      RTLD_NEXT, "pthread_create");
  const char *what = getenv("DFLASH_FAIL"), *token = getenv("DFLASH_FAIL_TOKEN");
  int kind = 0;
  long n = 0;
  if (!what || !token || sscanf(what, "%d:%ld", &kind, &n) != 2 || kind < 0 || kind >= KINDS)
    return;
  if (syscall(SYS_unlink, token) == 0) fault_arm(kind, n);
}

/* -- allocations -- */

extern void *__libc_malloc(size_t), *__libc_memalign(size_t, size_t),
    *__libc_calloc(size_t, size_t);

static int is_ours(const void* caller) {
  const uintptr_t at = (uintptr_t)caller;
  const int count = atomic_load(&num_ranges);
  for (int i = 0; i < count; ++i)
    if (at >= ranges[i].first && at < ranges[i].last) return 1;
  return 0;
}

#define REFUSE_ALLOCATION() \
  if (is_ours(__builtin_return_address(0)) && fails(MALLOC)) return errno = ENOMEM, NULL

void* malloc(size_t size) {
  REFUSE_ALLOCATION();
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  REFUSE_ALLOCATION();
  return __libc_calloc(count, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  REFUSE_ALLOCATION();
  return __libc_memalign(alignment, size);
}

/* -- system calls -- */

void* mmap(void* at, size_t length, int rights, int flags, int fd, off_t offset) {
  if (is_ours(__builtin_return_address(0)) && fails(MMAP)) return errno = ENOMEM, MAP_FAILED;
  return (void*)syscall(SYS_mmap, at, length, rights, flags, fd, offset);
}
void* mmap64(void* at, size_t length, int rights, int flags, int fd, off_t offset) {
  if (is_ours(__builtin_return_address(0)) && fails(MMAP)) return errno = ENOMEM, MAP_FAILED;
  return (void*)syscall(SYS_mmap, at, length, rights, flags, fd, offset);
}
int memfd_create(const char* name, unsigned flags) {
  if (fails(MEMFD)) return errno = EMFILE, -1;
  return (int)syscall(SYS_memfd_create, name, flags);
}
int eventfd(unsigned value, int flags) {
  if (fails(EVENTFD)) return errno = EMFILE, -1;
  return (int)syscall(SYS_eventfd2, value, flags);
}
ssize_t send(int fd, const void* bytes, size_t length, int flags) {
  if (fails(SEND)) return errno = ECONNRESET, -1;
  return syscall(SYS_sendto, fd, bytes, length, flags, NULL, 0);
}
ssize_t sendmsg(int fd, const struct msghdr* message, int flags) {
  if (fails(SEND)) return errno = ECONNRESET, -1;
  return syscall(SYS_sendmsg, fd, message, flags);
}
ssize_t recv(int fd, void* bytes, size_t length, int flags) {
  find_core();
  if (fails(RECV)) return errno = ECONNRESET, -1;
  return syscall(SYS_recvfrom, fd, bytes, length, flags, NULL, NULL);
}
ssize_t recvmsg(int fd, struct msghdr* message, int flags) {
  find_core();
  if (fails(RECV)) return errno = ECONNRESET, -1;
  return syscall(SYS_recvmsg, fd, message, flags);
}

static int open_at(int folder, const char* path, int flags, mode_t mode) {
  if (fails(OPEN)) return errno = EMFILE, -1;
  return (int)syscall(SYS_openat, folder, path, flags, mode);
}
#include "open_calls.h"

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*function)(void*),
                   void* argument) {
  if (fails(THREAD)) return EAGAIN;
  return real_thread(thread, attributes, function, argument);
}
