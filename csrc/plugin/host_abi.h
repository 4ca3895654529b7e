/* The second C table of a plug-in: the device that a host's own tensors live on. A host moves rows
 * between that device and memory that the data paths read and write; what computes experts there is
 * a backend (backend_abi.h) of its own.
 *
 * The rules of backend_abi.h hold: append-only, struct_size first, 0 or the number of an ErrorCode,
 * nothing thrown. dflash_transfer lies in arrays and never changes. A host's device is used by one
 * thread at a time, any thread; what was current for it is current again afterwards.
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
  int32_t
      dlpack_type; /* of tensors on this device; a simulated device's stand in on the processor */
  int32_t dlpack_id;
  uint32_t reserved;
  uint64_t stream; /* of its queue, as producers of DLPack tensors take it; 0: none, work is done by
                      the thread that waits */
  char name[DFLASH_TEXT_BYTES]; /* "cuda 0 (NVIDIA H200)" */
} dflash_host_info;

/* One piece of a copy: a device's address, and memory of the host. */
typedef struct dflash_transfer {
  void* device;
  void* host;
  uint64_t num_bytes;
} dflash_transfer;

/* A device step: every exchange of a model's decode step without the host in between. The layouts
 * that a device reads and writes are those of docs/protocol.md and csrc/transport/ring/layout.h.
 * dflash_step_shard, _lane and _message lie in arrays and never change. */
typedef struct dflash_step_shard {
  uint64_t weights_fingerprint;
  uint32_t shard; /* id; ascending in a layer */
  uint32_t lane;  /* its worker's place in dflash_step.lanes */
  uint32_t slot;  /* its place among this worker's shards of the layer */
  uint32_t reserved;
} dflash_step_shard;
typedef struct dflash_step_layer {
  uint32_t struct_size;
  uint32_t layer, in_size, out_size;
  uint32_t num_shards, num_experts;
  const dflash_step_shard* shards;
  const uint32_t* experts; /* [num_experts] shard's place << 16 | local id */
} dflash_step_layer;

typedef struct dflash_step_lane {
  void* requests; /* device's addresses of both segments, from map_memory */
  const void* replies;
  uint64_t generation;
  uint64_t request_slots, request_stride, reply_slots, reply_stride;
  uint32_t entry_mask;
  uint32_t head, tail; /* in units of the head words */
  uint32_t reserved;
} dflash_step_lane;
typedef struct dflash_step {
  uint32_t struct_size;
  uint32_t num_lanes;
  const dflash_step_lane* lanes;
  uint64_t request_bytes, reply_bytes; /* the smallest slots */
  uint64_t first_call;
  uint32_t request_dtype, reply_dtype;
  int64_t budget_ns;
  uint64_t stream; /* of the caller's framework, if has_stream; else the device's own queue */
  uint32_t has_stream;
  uint32_t reserved;
} dflash_step;

/* Addresses are the device's; they stay valid until the step ended. */
typedef struct dflash_step_call {
  uint32_t struct_size;
  uint32_t layer;
  const void* hidden_states;
  uint64_t row_stride_bytes;
  const void* topk_ids;
  const void* topk_weights;
  void* output;
  uint32_t dtype, weights_dtype;
  uint32_t num_tokens, top_k;
  uint32_t ids_are_64bit;
  uint32_t reserved;
} dflash_step_call;

typedef struct dflash_step_message {
  uint32_t call, layer, lane, num_rows, num_pairs, reserved;
  uint64_t request_bytes, reply_bytes;
} dflash_step_message;
typedef struct dflash_step_outcome {
  uint32_t struct_size;
  int32_t
      code; /* ErrorCode of the first failure; 0: none. lanes and messages are filled in any case */
  uint32_t layer, lane, slot; /* where; lane ~0: at no worker */
  uint32_t detail;         /* token of kRange and kInvalidArgument; what did not fit of kProtocol */
  dflash_step_lane* lanes; /* [num_lanes of the step], the caller's memory */
  dflash_step_message* messages; /* [max_messages], the caller's; those that travelled */
  uint32_t max_messages, num_messages;
} dflash_step_outcome;

typedef struct dflash_host_table {
  uint32_t struct_size;
  uint32_t abi_version;
  const char* name;    /* cuda, hip, sim */
  const char* version; /* of the package it was built with */

  int32_t (*open)(uint32_t device, const dflash_open_options* options, dflash_host** opened,
                  dflash_error* error);
  void (*close)(dflash_host* host);
  int32_t (*info)(dflash_host* host, dflash_host_info* info, dflash_error* error);

  /* Memory of the host that the device copies from and to fastest. */
  int32_t (*allocate_pinned)(dflash_host* host, uint64_t num_bytes, void** memory,
                             dflash_error* error);
  void (*release_pinned)(dflash_host* host, void* memory);
  /* Copies all pieces and returns when they are there. Past `timeout_ns` the device counts as hung,
   * and every later call fails. */
  int32_t (*copy_in)(dflash_host* host, const dflash_transfer* pieces, uint32_t num_pieces,
                     int64_t timeout_ns, dflash_error* error);
  int32_t (*copy_out)(dflash_host* host, const dflash_transfer* pieces, uint32_t num_pieces,
                      int64_t timeout_ns, dflash_error* error);

  /* Lets the device's kernels use whole pages of the host's memory until they are unmapped;
   * kUnsupported where the driver refuses. */
  int32_t (*map_memory)(dflash_host* host, void* memory, uint64_t num_bytes, uint32_t is_read_only,
                        void** device, dflash_error* error);
  void (*unmap_memory)(dflash_host* host, void* memory);
  int32_t (*step_layer)(dflash_host* host, const dflash_step_layer* layer, dflash_error* error);
  int32_t (*step_begin)(dflash_host* host, const dflash_step* step, dflash_error* error);
  /* Queues a call and returns. */
  int32_t (*step_add)(dflash_host* host, const dflash_step_call* call, dflash_error* error);
  /* Until everything queued is done, at most `timeout_ns`. A device without processors of its own
   * computes here. */
  int32_t (*step_wait)(dflash_host* host, int64_t timeout_ns, uint32_t* is_done,
                       dflash_error* error);
  /* Waits of the step end soon. Any thread, at any time. */
  void (*step_abort)(dflash_host* host);
  /* Once all is done. */
  int32_t (*step_end)(dflash_host* host, dflash_step_outcome* outcome, dflash_error* error);
  /* For a step whose work does not end in spite of abort: the device counts as hung. */
  void (*step_give_up)(dflash_host* host);
} dflash_host_table;

/* What a plug-in exports under DFLASH_HOST_SYMBOL. The table lives as long as the process. */
typedef const dflash_host_table* (*dflash_host_entry)(void);

#ifdef __cplusplus
}
#endif
#endif
