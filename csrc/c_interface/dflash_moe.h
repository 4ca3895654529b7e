/* The C interface of dflash_moe: a program without Python calls the routed experts of a model,
 * which workers hold in other processes. `dflash-moe llama -- PROGRAM` starts the workers, loads
 * them and tells the program, through its environment, where they are handed over.
 *
 * Every function may be called from any thread. Nothing here throws, aborts or writes to the
 * standard streams. Functions that can fail return a status below 0 or NULL, and
 * dflash_moe_error() then returns a sentence for the calling thread.
 *
 * Structs begin with their own size, which the caller sets: a later version appends members, and
 * fills no more than the caller has room for.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef DFLASH_MOE_H
#define DFLASH_MOE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DFLASH_MOE_INTERFACE_VERSION 1

#if defined(_MSC_VER)
#define DFLASH_MOE_API
#else
#define DFLASH_MOE_API __attribute__((visibility("default")))
#endif

/* What a function returns. */
enum {
  DFLASH_MOE_OK = 0,
  DFLASH_MOE_PENDING = 1,      /* dflash_moe_wait: the time is over and the call is not done */
  DFLASH_MOE_STUB = 2,         /* dflash_moe_check_tensor: it is the workers', read from a stub */
  DFLASH_MOE_INVALID = -1,     /* an argument is wrong; the text names it */
  DFLASH_MOE_WORKER_LOST = -2, /* a worker that the call needs is gone */
  DFLASH_MOE_TIMEOUT = -3,     /* the call's own deadline passed */
  DFLASH_MOE_CLOSED = -4,      /* the supervisor is gone, or the client was closed */
  DFLASH_MOE_MISMATCH = -5,    /* bytes or a tensor are not those that the workers hold */
  DFLASH_MOE_FAILED = -6       /* anything else, such as a worker's refusal */
};

typedef struct dflash_moe_client dflash_moe_client; /* the workers of one model */
typedef struct dflash_moe_call dflash_moe_call;     /* one submitted call */

/* A layer with routed experts. Text belongs to the client and lives as long as it. */
typedef struct {
  size_t struct_bytes;
  const char* name;
  uint32_t layer; /* its number, by which calls name it: the block's in GGUF */
  uint32_t in_size, intermediate_size, out_size;
  uint32_t num_experts, top_k;
  uint32_t activation, gate; /* numbers of csrc/compute/experts/ffn_spec.h */
  float alpha, up_offset;
  float gate_max, up_limit; /* infinite where there is no limit */
  int has_gate_up_bias, has_down_bias;
} dflash_moe_layer;

/* A tensor of the workers' GGUF file that a program need not load. */
typedef struct {
  size_t struct_bytes;
  const char* name;
  uint32_t layer;
  uint32_t ggml_type; /* the type's number in GGUF */
  uint32_t num_extents;
  uint64_t extents[4]; /* in GGUF's order, the fastest one first; 1 beyond num_extents */
  uint64_t num_bytes;
} dflash_moe_tensor;

/* One call of a layer's experts. The memory stays the caller's and must not change until the call
 * is done or abandoned. */
typedef struct {
  size_t struct_bytes;
  uint32_t layer;
  uint32_t num_tokens, top_k;
  const float* hidden_states;  /* [num_tokens, in_size] */
  size_t hidden_states_stride; /* bytes from one row to the next; 0 means adjacent rows */
  const int32_t* topk_ids;     /* [num_tokens, top_k]; num_experts asks for nothing */
  const float* topk_weights;   /* [num_tokens, top_k] */
  float* output;               /* [num_tokens, out_size], adjacent rows; all of it is written */
} dflash_moe_batch;

/* Counters since the client was opened. */
typedef struct {
  size_t struct_bytes;
  uint64_t calls, failed_calls;
  uint64_t messages; /* requests that were sent: one for each slice and worker */
  uint64_t rows;     /* rows in these requests */
  uint64_t request_bytes, reply_bytes;
  uint64_t floor_bytes; /* what an ideal exchange of the same rows would move */
  uint64_t call_ns;     /* from submit to the end, of all calls together */
  uint64_t compute_ns;  /* for which workers computed, as their replies say */
} dflash_moe_counters;

/* The version of this library's interface, DFLASH_MOE_INTERFACE_VERSION when it was compiled. */
DFLASH_MOE_API uint32_t dflash_moe_interface_version(void);

/* Takes what a supervisor hands over on the Unix socket at `path`; NULL reads path and token from
 * the environment (DFLASH_MOE_HANDOVER, DFLASH_MOE_HANDOVER_TOKEN_FD), where a program finds them
 * that `dflash-moe llama` has started. Blocks until every worker can be called, for at most the
 * supervisor's start timeout, or 600 s where the supervisor stands still. One client per process
 * can be open. Returns NULL with a text. */
DFLASH_MOE_API dflash_moe_client* dflash_moe_open(const char* path);

/* Ends calls that are under way (DFLASH_MOE_CLOSED) and frees the client. No other function may be
 * running or called with it or its calls any more. NULL is ignored. */
DFLASH_MOE_API void dflash_moe_close(dflash_moe_client* client);

/* The workers' GGUF architecture, such as "qwen3moe". */
DFLASH_MOE_API const char* dflash_moe_architecture(const dflash_moe_client* client);

DFLASH_MOE_API uint32_t dflash_moe_num_layers(const dflash_moe_client* client);
/* Fills `layer` with the one at `position`, in ascending number. */
DFLASH_MOE_API int dflash_moe_layer_at(const dflash_moe_client* client, uint32_t position,
                                       dflash_moe_layer* layer);
DFLASH_MOE_API uint32_t dflash_moe_num_tensors(const dflash_moe_client* client);
DFLASH_MOE_API int dflash_moe_tensor_at(const dflash_moe_client* client, uint32_t position,
                                        dflash_moe_tensor* tensor);

/* Compares a whole tensor, as a program has read it from its own file, with what the workers hold:
 * its stub pages where it is a stub, else a sample of a few KB. `data` has `num_bytes` bytes.
 * Returns DFLASH_MOE_OK, DFLASH_MOE_STUB, or DFLASH_MOE_MISMATCH with a text. */
DFLASH_MOE_API int dflash_moe_check_tensor(dflash_moe_client* client, const char* name,
                                           const void* data, size_t num_bytes);

/* Tells the supervisor that the program has met a tensor: `reason` NULL says that the workers stand
 * in for it, a text why the program keeps it. */
DFLASH_MOE_API void dflash_moe_report_tensor(dflash_moe_client* client, const char* name,
                                             const char* reason);

/* Starts a call and returns at once. NULL with a text where it was not taken; *status, where it is
 * not NULL, then says of what kind the error is. */
DFLASH_MOE_API dflash_moe_call* dflash_moe_submit(dflash_moe_client* client,
                                                  const dflash_moe_batch* batch, int* status);
/* Waits until the call is done, for at most `timeout_ns`; negative waits until the call's own
 * deadline has ended it. Returns DFLASH_MOE_PENDING, or how the call ended. */
DFLASH_MOE_API int dflash_moe_wait(dflash_moe_call* call, int64_t timeout_ns);
/* Ends the call if it is not done, and frees it. Afterwards the library touches none of the batch's
 * memory. Every submitted call has to be abandoned, also one that is done. NULL is ignored. */
DFLASH_MOE_API void dflash_moe_abandon(dflash_moe_call* call);

/* The sentence that belongs to the calling thread's last failure; "" where there was none. It stays
 * valid until this thread calls another function of this header. */
DFLASH_MOE_API const char* dflash_moe_error(void);

/* Fills `counters`. */
DFLASH_MOE_API int dflash_moe_count(dflash_moe_client* client, dflash_moe_counters* counters);

#ifdef __cplusplus
}
#endif

#endif /* DFLASH_MOE_H */
