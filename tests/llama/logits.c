/* Writes the logits that a llama.cpp model has for fixed tokens. `make llama-check` compiles it
 * against the user's llama.cpp: the tiny models that llama.cpp makes of its architectures have no
 * vocabulary, so that none of its own programs can be given a prompt.
 *
 *   logits -m MODEL OUT NUM_TOKENS
 *
 * OUT receives float32, [NUM_TOKENS + NUM_STEPS, vocabulary]: those of a prompt computed at once,
 * then of single tokens. Exit status 1 with llama.cpp's own words where something fails.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-backend.h"
#include "llama.h"

enum { NUM_STEPS = 3, MULTIPLIER = 31 };

static int write_rows(struct llama_context* context, FILE* out, int first, int count, int width) {
  for (int i = 0; i < count; ++i) {
    const float* row = llama_get_logits_ith(context, first + i);
    if (row == NULL || fwrite(row, sizeof(float), (size_t)width, out) != (size_t)width) return 1;
  }
  return 0;
}

static int decode(struct llama_context* context, FILE* out, int begin, int count, int width) {
  struct llama_batch batch = llama_batch_init(count, 0, 1);
  for (int i = 0; i < count; ++i) {
    batch.token[i] = (begin + i) * MULTIPLIER % width;
    batch.pos[i] = begin + i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = 1;
  }
  batch.n_tokens = count;
  const int failed = llama_decode(context, batch) != 0 || write_rows(context, out, 0, count, width);
  llama_batch_free(batch);
  return failed;
}

int main(int argc, char** argv) {
  if (argc != 5 || strcmp(argv[1], "-m") != 0) {
    fprintf(stderr, "usage: logits -m MODEL OUT NUM_TOKENS\n");
    return 2;
  }
  ggml_backend_load_all();
  struct llama_model_params model_params = llama_model_default_params();
  model_params.n_gpu_layers = 0;
  struct llama_model* model = llama_model_load_from_file(argv[2], model_params);
  if (model == NULL) return 1;
  struct llama_context_params params = llama_context_default_params();
  params.n_ctx = 128;
  params.n_ubatch = 64;
  params.n_threads = params.n_threads_batch = 1;
  struct llama_context* context = llama_init_from_model(model, params);
  if (context == NULL) return 1;
  FILE* out = fopen(argv[3], "wb");
  if (out == NULL) return 1;
  const int num_tokens = atoi(argv[4]);
  const int width = llama_vocab_n_tokens(llama_model_get_vocab(model));
  int failed = decode(context, out, 0, num_tokens, width);
  for (int step = 0; step < NUM_STEPS && !failed; ++step)
    failed = decode(context, out, num_tokens + step, 1, width);
  failed |= fclose(out) != 0;
  llama_free(context);
  llama_model_free(model);
  return failed;
}
