/* A host without Python that calls the first layer again and again, as long as its standard input
 * stays open, and then prints how many calls it has made and the sum that docs/examples/experts.c
 * prints. It fails where two calls have unlike bits. Inputs are those of that example.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _POSIX_C_SOURCE 200809L
#include <dflash_moe.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NUM_TOKENS = 4 };

int main(void) {
  dflash_moe_client* client = dflash_moe_open(NULL);
  if (client == NULL) return fprintf(stderr, "calling_host: %s\n", dflash_moe_error()), 1;
  dflash_moe_layer layer = {.struct_bytes = sizeof layer};
  if (dflash_moe_layer_at(client, 0, &layer) != DFLASH_MOE_OK) return 1;
  const size_t pairs = (size_t)NUM_TOKENS * layer.top_k;
  const size_t inputs = (size_t)NUM_TOKENS * layer.in_size;
  const size_t outputs = (size_t)NUM_TOKENS * layer.out_size;
  float* hidden = calloc(inputs, sizeof *hidden);
  float* weights = calloc(pairs, sizeof *weights);
  float* output = calloc(outputs, sizeof *output);
  float* first = calloc(outputs, sizeof *first);
  int32_t* ids = calloc(pairs, sizeof *ids);
  if (!hidden || !weights || !output || !first || !ids) return 1;
  for (size_t i = 0; i < inputs; ++i) hidden[i] = (float)(i % 17) / 16.0f - 0.5f;
  for (size_t i = 0; i < pairs; ++i) {
    ids[i] = (int32_t)((i / layer.top_k + i % layer.top_k) % layer.num_experts);
    weights[i] = 1.0f / (float)layer.top_k;
  }
  const dflash_moe_batch batch = {sizeof batch, layer.layer, NUM_TOKENS, layer.top_k, hidden, 0,
                                  ids,          weights,     output};
  struct pollfd input = {.fd = 0, .events = POLLIN};
  unsigned long long calls = 0;
  for (; poll(&input, 1, 0) == 0; ++calls) {
    dflash_moe_call* call = dflash_moe_submit(client, &batch, NULL);
    if (call == NULL || dflash_moe_wait(call, -1) != DFLASH_MOE_OK)
      return fprintf(stderr, "calling_host: %s\n", dflash_moe_error()), 1;
    dflash_moe_abandon(call);
    if (calls == 0) memcpy(first, output, outputs * sizeof *output);
    if (memcmp(first, output, outputs * sizeof *output) != 0)
      return fprintf(stderr, "calling_host: other bits\n"), 1;
  }
  double sum = 0;
  for (size_t i = 0; i < outputs; ++i) sum += (double)first[i] * (double)(i % 13 + 1);
  printf("calls %llu, sum %.9g\n", calls, sum);
  dflash_moe_close(client);
  return 0;
}
