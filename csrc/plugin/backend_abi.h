/* The C table through which the core drives a compute backend, whoever compiled it. Plain C, so
 * that a plug-in and the core need not share a compiler, a C++ library or an exception.
 *
 * Rules. Append-only: a field or function is only ever added at the end of its struct, and
 * struct_size, which the side that fills a struct sets, says what is there; readers take missing
 * fields as 0. dflash_matrix, dflash_vector and dflash_progress lie inside others and never change.
 * Functions return 0, or the number of an ErrorCode (csrc/base/result.h) with a sentence in
 * `error`. Nothing throws or aborts for what a caller passes. A device and its layers are used by
 * one thread at a time, except expert_load, which several threads may call for different experts.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef DFLASH_PLUGIN_BACKEND_ABI_H
#define DFLASH_PLUGIN_BACKEND_ABI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DFLASH_BACKEND_ABI_VERSION 2u /* changes only where appending cannot do */
#define DFLASH_BACKEND_SYMBOL "dflash_backend"
#define DFLASH_TEXT_BYTES 512u /* of every text buffer, its final 0 counted */

typedef struct dflash_device dflash_device; /* one opened device and its queue */
typedef struct dflash_layer dflash_layer;   /* the experts of one shard on a device */

typedef struct dflash_error {
  uint32_t struct_size;
  int32_t code;
  char text[DFLASH_TEXT_BYTES];
} dflash_error;

/* Called by the thread inside expert_load or wait, at least every 20 ms of work. */
typedef struct dflash_progress {
  void* context;
  void (*advance)(void* context, uint64_t steps);
} dflash_progress;

typedef struct dflash_probe {
  uint32_t struct_size;
  uint32_t num_devices;
  char reason[DFLASH_TEXT_BYTES]; /* why there is no device; empty where there is one */
} dflash_probe;

typedef struct dflash_device_info {
  uint32_t struct_size;
  uint32_t is_usable;
  uint64_t memory_bytes; /* in all; what is free is known once it is open */
  char name[DFLASH_TEXT_BYTES];
  char vendor[16];                /* whose kernels run: cpu, cuda, hip */
  char arch[32];                  /* sm_90, gfx906, x86_64 */
  char reason[DFLASH_TEXT_BYTES]; /* why it cannot be used */
} dflash_device_info;

typedef struct dflash_open_options {
  uint32_t struct_size;
  uint32_t num_threads; /* of the host's processor, for backends that compute there; at least 1 */
  uint64_t seed;        /* of a simulated device: the order in which its threads run */
} dflash_open_options;

/* Bit N of a mask: the value N of WeightFormat, NumericsClass and Dtype in csrc/compute and
 * csrc/base, which are append-only for that. */
typedef struct dflash_caps {
  uint32_t struct_size;
  uint32_t formats;
  uint32_t numerics;
  uint32_t dtypes;
  uint32_t max_rows; /* of one batch */
  uint32_t reserved;
  uint64_t free_bytes; /* of the device's memory, now */
} dflash_caps;

/* compute::FfnSpec, its enumerations by value. */
typedef struct dflash_ffn_spec {
  uint32_t struct_size;
  uint32_t in_size, intermediate_size, out_size;
  uint32_t activation, gate;
  uint32_t has_gate_up_bias, has_down_bias;
  float alpha, up_offset, gate_max, up_limit;
} dflash_ffn_spec;

typedef struct dflash_layer_options {
  uint32_t struct_size;
  uint32_t num_local_experts;
  uint32_t gate_up_format, down_format;
  uint32_t numerics;
} dflash_layer_options;

/* compute::MatrixView and VectorView: where a tensor lies in the mapped checkpoint. data NULL:
 * absent. */
typedef struct dflash_matrix {
  const void* data;
  const void* scales;
  int64_t output_stride, input_stride, scales_stride;
  uint32_t format, outputs, inputs;
  uint32_t scale_outputs; /* outputs that share a row of scales; 0: as many as the format says */
} dflash_matrix;
typedef struct dflash_vector {
  const void* data;
  int64_t stride;
  uint32_t dtype, count;
} dflash_vector;

typedef struct dflash_expert {
  uint32_t struct_size;
  uint32_t local_expert_id;
  dflash_matrix gate, up, down;
  dflash_vector gate_bias, up_bias, down_bias;
} dflash_expert;

/* compute::ForwardArgs. Everything stays valid and unchanged until the batch was waited for; counts
 * and ids were checked. `rows` may be written by a peer meanwhile: each element is read once. */
typedef struct dflash_batch {
  uint32_t struct_size;
  uint32_t num_rows, num_pairs;
  uint32_t row_dtype, reply_dtype;
  const void* rows;
  const uint16_t* row_counts;
  const uint16_t* local_expert_ids;
  const float* weights;
  void* reply;
} dflash_batch;

typedef struct dflash_selftest {
  uint32_t struct_size;
  uint32_t num_cases; /* of this device; ask for 0 .. num_cases - 1 */
  uint64_t elements, differing;
  char kernel[64];  /* what ran, such as "f32-canonical silu" */
  char formats[64]; /* of the weights */
} dflash_selftest;

typedef struct dflash_backend_table {
  uint32_t struct_size;
  uint32_t abi_version;
  const char* name;    /* cpu, cuda, hip, sim */
  const char* version; /* of the package it was built with */

  /* Never fails: what keeps the backend from having devices is `reason`. */
  void (*probe)(dflash_probe* found);
  int32_t (*device_info)(uint32_t device, dflash_device_info* info, dflash_error* error);
  int32_t (*open)(uint32_t device, const dflash_open_options* options, dflash_device** opened,
                  dflash_error* error);
  /* After its last layer was dropped. */
  void (*close)(dflash_device* device);
  int32_t (*caps)(dflash_device* device, dflash_caps* caps, dflash_error* error);

  /* Bytes that such a layer will hold on the device. */
  int32_t (*layer_bytes)(dflash_device* device, const dflash_ffn_spec* spec,
                         const dflash_layer_options* options, uint64_t* bytes, dflash_error* error);
  int32_t (*layer_define)(dflash_device* device, const dflash_ffn_spec* spec,
                          const dflash_layer_options* options, dflash_layer** defined,
                          dflash_error* error);
  void (*layer_drop)(dflash_layer* layer);
  uint64_t (*layer_resident_bytes)(const dflash_layer* layer);
  int32_t (*expert_load)(dflash_layer* layer, const dflash_expert* expert,
                         const dflash_progress* progress, dflash_error* error);

  /* Queues a batch; never blocks, never allocates. Tickets of a device ascend; a full queue is an
   * error. */
  int32_t (*submit)(dflash_layer* layer, const dflash_batch* batch, uint64_t* ticket,
                    dflash_error* error);
  /* Until the batch of this ticket is done; its error if it failed. A backend without threads of
   * its own computes here. Past `timeout_ns` the error is kTimeout where the work could be left at
   * all, and the batch counts as waited for. */
  int32_t (*wait)(dflash_device* device, uint64_t ticket, int64_t timeout_ns,
                  const dflash_progress* progress, dflash_error* error);

  /* One comparison of this device's kernels with the reference on seeded random data. */
  int32_t (*selftest)(dflash_device* device, uint32_t test_case, dflash_selftest* result,
                      dflash_error* error);

  /* Nanoseconds that the device computed in all batches of this layer so far, copies aside; 0 where
   * the caller's threads compute. */
  int64_t (*layer_device_ns)(const dflash_layer* layer);

  /* What the source bytes of a loaded expert add up to (csrc/compute/experts/content_checksum.h).
   * Returns 1, or 0 where the backend has not read them all or the expert is not loaded. */
  int32_t (*expert_checksum)(const dflash_layer* layer, uint32_t local_expert_id,
                             uint64_t* checksum);
} dflash_backend_table;

/* What a plug-in exports under DFLASH_BACKEND_SYMBOL. The table lives as long as the process. */
typedef const dflash_backend_table* (*dflash_backend_entry)(void);

#ifdef __cplusplus
}
#endif
#endif
