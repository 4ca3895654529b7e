/* The C table of a plug-in that measures what a doorbell costs on a device:
 * libdflash_cuda_measure.so and its like, which only dflash_moe/_measure opens. The rules of
 * plugin/backend_abi.h hold.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef DFLASH_MEASURE_BELLS_ABI_H
#define DFLASH_MEASURE_BELLS_ABI_H

#include "plugin/backend_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DFLASH_BELLS_ABI_VERSION 2u /* changes only where appending is not enough */
#define DFLASH_BELLS_SYMBOL "dflash_bells"

typedef struct dflash_bell_device dflash_bell_device; /* one device, with a queue of its own */

/* A ping-pong of the device with a processor. */
typedef struct dflash_bell_rounds {
  uint32_t struct_size;
  uint32_t reserved;
  /* The device's addresses of two words, from map_memory or of pinned memory. The device writes the
   * round's number to `ring`, and the answer to it is the same number. */
  void* ring;
  const void* answer;
  uint32_t first, num_rounds;
  int64_t budget_ns; /* for all rounds together */
  uint32_t num_done; /* filled in: rounds answered in time */
  uint32_t reserved_too;
} dflash_bell_rounds;

typedef struct dflash_bells_table {
  uint32_t struct_size;
  uint32_t abi_version;
  const char* name;    /* "cuda", "hip" or "sim" */
  const char* version; /* of the package with which it was built */

  /* Opens a device and fills `name` [DFLASH_TEXT_BYTES], for example "cuda 0 (NVIDIA H200)". */
  int32_t (*open)(uint32_t device, dflash_bell_device** opened, char* name, dflash_error* error);
  void (*close)(dflash_bell_device* device);
  /* Allocates memory of the host that the device uses in place. */
  int32_t (*allocate_pinned)(dflash_bell_device* device, uint64_t num_bytes, void** memory,
                             dflash_error* error);
  void (*release_pinned)(dflash_bell_device* device, void* memory);
  /* Lets the device use whole pages of the host's memory until they are unmapped; kUnsupported
   * where the driver refuses. */
  int32_t (*map_memory)(dflash_bell_device* device, void* memory, uint64_t num_bytes,
                        uint32_t is_read_only, void** mapped, dflash_error* error);
  void (*unmap_memory)(dflash_bell_device* device, void* memory);
  /* Rings by a kernel that stores and polls, as device steps do, and returns once all rounds are
   * done or the budget is over. */
  int32_t (*ring)(dflash_bell_device* device, dflash_bell_rounds* bells, dflash_error* error);
} dflash_bells_table;

/* What such a plug-in exports under DFLASH_BELLS_SYMBOL. The table lives as long as the process. */
typedef const dflash_bells_table* (*dflash_bells_entry)(void);

#ifdef __cplusplus
}
#endif
#endif
