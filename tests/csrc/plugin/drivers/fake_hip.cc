// A libamdhip64 that a test loads in the runtime's place: one device; only the code object whose
// first byte is 6 fits it. FAKE_HIP=none: no device. Its last error is the framework's to find, as
// in ROCm 7: no later success takes it away.
// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>

#define FAKE extern "C" __attribute__((visibility("default")))

namespace {
int anything = 0;
thread_local int last = 0;
bool is(const char* fault) {
  const char* asked = ::getenv("FAKE_HIP");
  return asked != nullptr && ::strcmp(asked, fault) == 0;
}
}  // namespace

FAKE int hipInit(unsigned) { return is("none") ? 101 : 0; }
FAKE int hipGetDeviceCount(int* count) { return *count = 1, 0; }
FAKE int hipDeviceGet(int* device, int index) { return *device = index, 0; }
FAKE int hipDeviceGetName(char* name, int size, int) {
  return ::strncpy(name, "Fake Radeon", static_cast<size_t>(size)), 0;
}
FAKE int hipDeviceTotalMem(size_t* bytes, int) { return *bytes = size_t{16} << 30, 0; }
FAKE int hipSetDevice(int) { return 0; }
FAKE int hipGetDevice(int* device) { return *device = 0, 0; }
FAKE int hipMemGetInfo(size_t* free_bytes, size_t* all) {
  return *free_bytes = size_t{15} << 30, *all = size_t{16} << 30, 0;
}
FAKE int hipMalloc(void** memory, size_t bytes) { return *memory = ::malloc(bytes), 0; }
FAKE int hipFree(void* memory) { return ::free(memory), 0; }
FAKE int hipHostMalloc(void** memory, size_t bytes, unsigned) {
  return *memory = ::malloc(bytes), 0;
}
FAKE int hipHostFree(void* memory) { return ::free(memory), 0; }
FAKE int hipHostRegister(void*, size_t, unsigned flags) { return (flags & 8) != 0 ? 801 : 0; }
FAKE int hipHostUnregister(void*) { return 0; }
FAKE int hipHostGetDevicePointer(void** device, void* memory, unsigned) {
  return *device = memory, 0;
}
FAKE int hipStreamCreateWithFlags(void** stream, unsigned) { return *stream = &anything, 0; }
FAKE int hipStreamDestroy(void*) { return 0; }
FAKE int hipStreamQuery(void*) { return 0; }
FAKE int hipMemcpyHtoDAsync(void* to, void* from, size_t bytes, void*) {
  return ::memcpy(to, from, bytes), 0;
}
FAKE int hipMemcpyDtoHAsync(void* to, void* from, size_t bytes, void*) {
  return ::memcpy(to, from, bytes), 0;
}
FAKE int hipMemsetD8Async(void* to, unsigned char value, size_t bytes, void*) {
  return ::memset(to, value, bytes), 0;
}
FAKE int hipEventCreateWithFlags(void** event, unsigned) { return *event = &anything, 0; }
FAKE int hipEventDestroy(void*) { return 0; }
FAKE int hipEventRecord(void*, void*) { return 0; }
FAKE int hipEventElapsedTime(float* milliseconds, void*, void*) { return *milliseconds = 1.0f, 0; }
FAKE int hipModuleLoadData(void** module, const void* image) {
  *module = &anything;
  return *static_cast<const char*>(image) == 6 ? 0 : last = 209;
}
FAKE int hipGetLastError() {
  const int found = last;
  return last = 0, found;
}
FAKE int hipDeviceGetPCIBusId(char* text, int size, int) {
  return ::strncpy(text, "0000:c3:00.0", static_cast<size_t>(size)), 0;
}
FAKE int hipModuleUnload(void*) { return 0; }
FAKE int hipModuleGetFunction(void** function, void*, const char*) {
  return *function = &anything, 0;
}
FAKE int hipModuleLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                               unsigned, void*, void**, void**) {
  return 0;
}
FAKE const char* hipGetErrorString(int status) {
  return status == 209 ? "no kernel image is available" : "hip error";
}
