/* Prints, for every call of one token, the nanoseconds from submit to result less those for which
 * the worker computed, as its reply says. bench/campaigns/llama_hosts.py compiles and runs it.
 *
 *   added_time CALLS
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "dflash_moe.h"

enum { WARM_UP = 200 };

static long long now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

int main(int argc, char** argv) {
  const int calls = argc == 2 ? atoi(argv[1]) : 0;
  dflash_moe_client* client = dflash_moe_open(NULL);
  dflash_moe_layer layer = {.struct_bytes = sizeof layer};
  if (calls <= 0 || client == NULL || dflash_moe_layer_at(client, 0, &layer) != DFLASH_MOE_OK) {
    fprintf(stderr, "added_time CALLS: %s\n", dflash_moe_error());
    return 2;
  }
  float* hidden_states = calloc(layer.in_size, sizeof(float));
  float* output = calloc(layer.out_size, sizeof(float));
  int32_t* ids = calloc(layer.top_k, sizeof(int32_t));
  float* weights = calloc(layer.top_k, sizeof(float));
  if (!hidden_states || !output || !ids || !weights) return 1;
  for (uint32_t i = 0; i < layer.in_size; ++i) hidden_states[i] = (float)(i % 17) / 17;
  for (uint32_t k = 0; k < layer.top_k; ++k) weights[k] = 1.0f / (float)layer.top_k;
  dflash_moe_counters counters = {.struct_bytes = sizeof counters};
  for (int call = -WARM_UP; call < calls; ++call) {
    for (uint32_t k = 0; k < layer.top_k; ++k)
      ids[k] = (int32_t)(((uint32_t)(call + WARM_UP) * layer.top_k + k) % layer.num_experts);
    const dflash_moe_batch batch = {sizeof batch, layer.layer, 1,     layer.top_k, hidden_states, 0,
                                    ids,          weights,     output};
    dflash_moe_count(client, &counters);
    const unsigned long long computed = counters.compute_ns;
    const long long began = now_ns();
    dflash_moe_call* submitted = dflash_moe_submit(client, &batch, NULL);
    const int status = submitted ? dflash_moe_wait(submitted, -1) : DFLASH_MOE_FAILED;
    const long long took = now_ns() - began;
    if (status != DFLASH_MOE_OK) {
      fprintf(stderr, "%s\n", dflash_moe_error());
      return 1;
    }
    dflash_moe_abandon(submitted);
    dflash_moe_count(client, &counters);
    if (call >= 0) printf("%lld\n", took - (long long)(counters.compute_ns - computed));
  }
  dflash_moe_close(client);
  return 0;
}
