// A libcuda that a test loads in the driver's place: two devices whose memory is the machine's,
// kernels that only count, and faults on request through FAKE_CUDA: "none" (no device), "old"
// (driver of CUDA 12), "silent" (does not start), "full" (no memory), "lost" (the card is gone at
// the second query), "hung" (work that never ends), "foreign" (no image fits), "unreadable" (no
// read-only registration), "sealed" (no registration at all), "twins" (both devices are good).
// A context holds its streams and events, and another one refuses them.
// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>

namespace {

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kNoDevice = 100, kNoContext = 201,
              kNoBinary = 209, kInvalidHandle = 400, kNotReady = 600;
constexpr int kIllegalAddress = 700, kNotSupported = 801, kUnknown = 999;
int queries = 0;
unsigned dynamic_bytes = 0;  // allowed
int contexts[2] = {};
thread_local void* current = nullptr;
int in_its_context(void* made_in) {
  return current == nullptr ? kNoContext : current != made_in ? kInvalidHandle : 0;
}

bool is(const char* fault) {
  const char* asked = ::getenv("FAKE_CUDA");
  return asked != nullptr && ::strcmp(asked, fault) == 0;
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default")))
using Pointer = unsigned long long;

FAKE int cuInit(unsigned) { return is("none") ? kNoDevice : is("silent") ? kUnknown : 0; }
FAKE int cuDriverGetVersion(int* version) { return *version = is("old") ? 12040 : 13000, 0; }
FAKE int cuDeviceGetCount(int* count) { return *count = 2, 0; }
FAKE int cuDeviceGet(int* device, int index) { return *device = index, 0; }
FAKE int cuDeviceGetName(char* name, int size, int device) {
  ::strncpy(name, device == 0 ? "Fake card" : "Fake old card", static_cast<size_t>(size));
  return 0;
}
FAKE int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = 1 << 20, 0; }
FAKE int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const bool is_new = device == 0 || is("twins");
  *value = attribute == 75   ? (is_new ? 9 : 6)
           : attribute == 76 ? (is_new ? 0 : 1)
           : attribute == 10 ? 32
                             : 132;
  return 0;
}
FAKE int cuDevicePrimaryCtxRetain(void** context, int device) {
  return *context = &contexts[device], 0;
}
FAKE int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
FAKE int cuCtxSetCurrent(void* context) { return current = context, 0; }
FAKE int cuCtxGetCurrent(void** context) { return *context = current, 0; }
FAKE int cuMemGetInfo_v2(size_t* free_bytes, size_t* all) {
  if (current == nullptr) return kNoContext;
  return *free_bytes = 4096, *all = 1 << 20, 0;
}
FAKE int cuMemAlloc_v2(Pointer* memory, size_t bytes) {
  if (current == nullptr) return kNoContext;
  if (is("full")) return kOutOfMemory;
  *memory = reinterpret_cast<Pointer>(::malloc(bytes));
  return 0;
}
FAKE int cuMemFree_v2(Pointer memory) { return ::free(reinterpret_cast<void*>(memory)), 0; }
FAKE int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  return *memory = ::malloc(bytes), 0;
}
FAKE int cuMemFreeHost(void* memory) { return ::free(memory), 0; }
FAKE int cuMemHostRegister_v2(void*, size_t, unsigned flags) {
  return is("sealed") || (is("unreadable") && (flags & 8) != 0) ? kNotSupported : 0;
}
FAKE int cuMemHostUnregister(void*) { return 0; }
FAKE int cuMemHostGetDevicePointer_v2(Pointer* device, void* memory, unsigned) {
  return *device = reinterpret_cast<Pointer>(memory), 0;
}
FAKE int cuStreamCreate(void** stream, unsigned) { return queries = 0, *stream = current, 0; }
FAKE int cuStreamDestroy_v2(void*) { return 0; }
FAKE int cuStreamQuery(void* stream) {
  if (stream == nullptr) return 0;  // every context has a default stream
  if (const int status = in_its_context(stream); status != 0) return status;
  if (is("hung")) return kNotReady;
  return ++queries == 1 ? kNotReady : is("lost") ? kIllegalAddress : 0;
}
FAKE int cuMemcpyHtoDAsync_v2(Pointer to, const void* from, size_t bytes, void*) {
  return ::memcpy(reinterpret_cast<void*>(to), from, bytes), 0;
}
FAKE int cuMemcpyDtoHAsync_v2(void* to, Pointer from, size_t bytes, void*) {
  return ::memcpy(to, reinterpret_cast<const void*>(from), bytes), 0;
}
FAKE int cuMemsetD8Async(Pointer to, unsigned char value, size_t bytes, void*) {
  return ::memset(reinterpret_cast<void*>(to), value, bytes), 0;
}
FAKE int cuEventCreate(void** event, unsigned) { return *event = current, 0; }
FAKE int cuEventDestroy_v2(void*) { return 0; }
FAKE int cuEventRecord(void* event, void*) { return in_its_context(event); }
FAKE int cuEventElapsedTime(float* milliseconds, void*, void*) { return *milliseconds = 1.0f, 0; }
FAKE int cuModuleLoadData(void** module, const void*) {
  return is("foreign") ? kNoBinary : (*module = &queries, 0);
}
FAKE int cuModuleUnload(void*) { return 0; }
FAKE int cuModuleGetFunction(void** function, void*, const char* name) {
  if (::strncmp(name, "dflash_", 7) != 0) return 500;  // CUDA_ERROR_NOT_FOUND
  *function = &queries;
  return 0;
}
FAKE int cuFuncSetAttribute(void*, int attribute, int value) {
  if (attribute != 8) return kInvalidValue;
  return dynamic_bytes = static_cast<unsigned>(value), 0;
}
// As a card: more dynamic shared memory than 48 KiB only after it was allowed.
FAKE int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned dynamic, void*, void** arguments, void**) {
  if (dynamic > 48 * 1024 && dynamic > dynamic_bytes) return kInvalidValue;
  return arguments == nullptr || arguments[0] == nullptr ? 1 : 0;
}
FAKE int cuGetErrorString(int status, const char** text) {
  *text = status == kIllegalAddress ? "an illegal memory access was encountered"
          : status == kNoBinary     ? "no kernel image is available"
                                    : "unknown error";
  return 0;
}
