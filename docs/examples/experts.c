/* Calls the routed experts of a model from C: `dflash-moe llama -- ./experts` starts the workers and
 * this program. Build it with the header and library of an installed package:
 *   cc -std=c11 experts.c -I"$package/include" "$package/libdflash_moe.so" -Wl,-rpath,"$package"
 * SPDX-License-Identifier: Apache-2.0
 */
#include <dflash_moe.h>
#include <stdio.h>
#include <stdlib.h>

enum { NUM_TOKENS = 4 };

int main(void) {
  /* The environment says where the supervisor is and proves that it started this program. */
  dflash_moe_client* client = dflash_moe_open(NULL);
  if (client == NULL) return fprintf(stderr, "experts: %s\n", dflash_moe_error()), 1;

  dflash_moe_layer layer = {.struct_bytes = sizeof layer};
  for (uint32_t i = dflash_moe_num_layers(client); i-- > 0;) { /* the first layer comes last */
    if (dflash_moe_layer_at(client, i, &layer) != DFLASH_MOE_OK) break;
    printf("layer %u, %s: %u experts, top %u, rows of %u\n", layer.layer, layer.name,
           layer.num_experts, layer.top_k, layer.in_size);
  }

  /* The router's part, which a model has: token t goes to experts t, t + 1, ... in equal shares. */
  const size_t pairs = (size_t)NUM_TOKENS * layer.top_k;
  const size_t inputs = (size_t)NUM_TOKENS * layer.in_size;
  const size_t outputs = (size_t)NUM_TOKENS * layer.out_size;
  float* hidden = calloc(inputs + 1, sizeof *hidden);
  float* weights = calloc(pairs + 1, sizeof *weights);
  float* output = calloc(outputs + 1, sizeof *output);
  int32_t* ids = calloc(pairs + 1, sizeof *ids);
  if (!hidden || !weights || !output || !ids || layer.num_experts == 0) return 1;
  for (size_t i = 0; i < inputs; ++i) hidden[i] = (float)(i % 17) / 16.0f - 0.5f;
  for (size_t i = 0; i < pairs; ++i) {
    ids[i] = (int32_t)((i / layer.top_k + i % layer.top_k) % layer.num_experts);
    weights[i] = 1.0f / (float)layer.top_k;
  }

  dflash_moe_batch batch = {.struct_bytes = sizeof batch, .layer = layer.layer,
                            .num_tokens = NUM_TOKENS, .top_k = layer.top_k,
                            .hidden_states = hidden, .topk_ids = ids,
                            .topk_weights = weights, .output = output};
  int status = DFLASH_MOE_FAILED;
  dflash_moe_call* call = dflash_moe_submit(client, &batch, &status);
  if (call != NULL) status = dflash_moe_wait(call, -1); /* the program could work meanwhile */
  if (status != DFLASH_MOE_OK) fprintf(stderr, "experts: %s\n", dflash_moe_error());
  dflash_moe_abandon(call); /* also a call that is done, and NULL */

  double sum = 0;
  for (size_t i = 0; i < outputs; ++i) sum += (double)output[i] * (double)(i % 13 + 1);
  dflash_moe_counters counted = {.struct_bytes = sizeof counted};
  dflash_moe_count(client, &counted);
  printf("sum %.6g, calls %llu, rows %llu, bytes %llu\n", sum, (unsigned long long)counted.calls,
         (unsigned long long)counted.rows,
         (unsigned long long)(counted.request_bytes + counted.reply_bytes));
  dflash_moe_close(client);
  return free(hidden), free(weights), free(output), free(ids), status == DFLASH_MOE_OK ? 0 : 1;
}
