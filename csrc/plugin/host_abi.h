/* The second C table of a plug-in: the device that a host's own tensors live on. A host moves rows between that device and memory that the data
 * paths read and write; what computes experts there is a backend (backend_abi.h) of its own.
 *
 * The rules of backend_abi.h hold: append-only, struct_size first, 0 or the number of an ErrorCode, nothing thrown. dflash_transfer lies in
 * arrays and never changes. A host's device is used by one thread at a time, any thread; what was current for it is current again afterwards.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef DFLASH_PLUGIN_HOST_ABI_H
#define DFLASH_PLUGIN_HOST_ABI_H

#include "plugin/backend_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DFLASH_HOST_ABI_VERSION 1u /* changes only where appending cannot do */
#define DFLASH_HOST_SYMBOL "dflash_host_device"

/* DLDeviceType of DLPack. */
#define DFLASH_DLPACK_CPU 1
#define DFLASH_DLPACK_CUDA 2
#define DFLASH_DLPACK_ROCM 10

typedef struct dflash_host dflash_host; /* one device of a host, with a queue of its own */

typedef struct dflash_host_info {
  uint32_t struct_size;
  int32_t dlpack_type;            /* of tensors on this device; a simulated device's stand in on the processor */
  int32_t dlpack_id;
  uint32_t reserved;
  uint64_t stream;                /* of its queue, as producers of DLPack tensors take it; 0: none, they owe nothing to a stream */
  char name[DFLASH_TEXT_BYTES];   /* "cuda 0 (NVIDIA H200)" */
} dflash_host_info;

/* One piece of a copy: a device's address, and memory of the host. */
typedef struct dflash_transfer {
  void* device;
  void* host;
  uint64_t num_bytes;
} dflash_transfer;

typedef struct dflash_host_table {
  uint32_t struct_size;
  uint32_t abi_version;
  const char* name;    /* cuda, hip, sim */
  const char* version; /* of the package it was built with */

  int32_t (*open)(uint32_t device, const dflash_open_options* options, dflash_host** opened, dflash_error* error);
  void (*close)(dflash_host* host);
  int32_t (*info)(dflash_host* host, dflash_host_info* info, dflash_error* error);

  /* Memory of the host that the device copies from and to fastest. */
  int32_t (*allocate_pinned)(dflash_host* host, uint64_t num_bytes, void** memory, dflash_error* error);
  void (*release_pinned)(dflash_host* host, void* memory);
  /* Copies all pieces and returns when they are there. Past `timeout_ns` the device counts as hung, and every later call fails. */
  int32_t (*copy_in)(dflash_host* host, const dflash_transfer* pieces, uint32_t num_pieces, int64_t timeout_ns, dflash_error* error);
  int32_t (*copy_out)(dflash_host* host, const dflash_transfer* pieces, uint32_t num_pieces, int64_t timeout_ns, dflash_error* error);
} dflash_host_table;

/* What a plug-in exports under DFLASH_HOST_SYMBOL. The table lives as long as the process. */
typedef const dflash_host_table* (*dflash_host_entry)(void);

#ifdef __cplusplus
}
#endif
#endif
