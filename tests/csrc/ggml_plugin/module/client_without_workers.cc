// An implementation of dflash_moe.h without any worker, for the plug-in as a file: it opens where
// the hand-over's variable says "empty", and has no layers.
// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <cstring>

#include "c_interface/dflash_moe.h"

struct dflash_moe_client {};
namespace {
dflash_moe_client the_client;
}

extern "C" {
uint32_t dflash_moe_interface_version(void) { return DFLASH_MOE_INTERFACE_VERSION; }
dflash_moe_client* dflash_moe_open(const char*) {
  const char* path = std::getenv("DFLASH_MOE_HANDOVER");
  return path && std::strcmp(path, "empty") == 0 ? &the_client : nullptr;
}
void dflash_moe_close(dflash_moe_client*) {}
const char* dflash_moe_architecture(const dflash_moe_client*) { return "none"; }
uint32_t dflash_moe_num_layers(const dflash_moe_client*) { return 0; }
int dflash_moe_layer_at(const dflash_moe_client*, uint32_t, dflash_moe_layer*) {
  return DFLASH_MOE_INVALID;
}
uint32_t dflash_moe_num_tensors(const dflash_moe_client*) { return 0; }
int dflash_moe_tensor_at(const dflash_moe_client*, uint32_t, dflash_moe_tensor*) {
  return DFLASH_MOE_INVALID;
}
int dflash_moe_check_tensor(dflash_moe_client*, const char*, const void*, size_t) {
  return DFLASH_MOE_MISMATCH;
}
void dflash_moe_report_tensor(dflash_moe_client*, const char*, const char*) {}
dflash_moe_call* dflash_moe_submit(dflash_moe_client*, const dflash_moe_batch*, int* status) {
  if (status) *status = DFLASH_MOE_FAILED;
  return nullptr;
}
int dflash_moe_wait(dflash_moe_call*, int64_t) { return DFLASH_MOE_FAILED; }
void dflash_moe_abandon(dflash_moe_call*) {}
const char* dflash_moe_error(void) { return "there are no workers here"; }
int dflash_moe_count(dflash_moe_client*, dflash_moe_counters*) { return DFLASH_MOE_FAILED; }
}
