// The functions and values of CUDA's driver API that are used, as cuda.h declares them: handles and
// enumerations by their size. A test compares them with the vendor's header where one is installed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

// X(member, name, type)
#define DFLASH_CUDA_FUNCTIONS(X)                                                              \
  X(init_, cuInit, int(unsigned))                                                             \
  X(version_, cuDriverGetVersion, int(int*))                                                  \
  X(count_, cuDeviceGetCount, int(int*))                                                      \
  X(device_, cuDeviceGet, int(int*, int))                                                     \
  X(name_, cuDeviceGetName, int(char*, int, int))                                             \
  X(total_, cuDeviceTotalMem_v2, int(size_t*, int))                                           \
  X(attribute_, cuDeviceGetAttribute, int(int*, int, int))                                    \
  X(retain_, cuDevicePrimaryCtxRetain, int(void**, int))                                      \
  X(release_context_, cuDevicePrimaryCtxRelease_v2, int(int))                                 \
  X(set_current_, cuCtxSetCurrent, int(void*))                                                \
  X(get_current_, cuCtxGetCurrent, int(void**))                                               \
  X(memory_, cuMemGetInfo_v2, int(size_t*, size_t*))                                          \
  X(allocate_, cuMemAlloc_v2, int(unsigned long long*, size_t))                               \
  X(release_, cuMemFree_v2, int(unsigned long long))                                          \
  X(allocate_host_, cuMemHostAlloc, int(void**, size_t, unsigned))                            \
  X(release_host_, cuMemFreeHost, int(void*))                                                 \
  X(register_, cuMemHostRegister_v2, int(void*, size_t, unsigned))                            \
  X(unregister_, cuMemHostUnregister, int(void*))                                             \
  X(device_pointer_, cuMemHostGetDevicePointer_v2, int(unsigned long long*, void*, unsigned)) \
  X(create_stream_, cuStreamCreate, int(void**, unsigned))                                    \
  X(destroy_stream_, cuStreamDestroy_v2, int(void*))                                          \
  X(query_, cuStreamQuery, int(void*))                                                        \
  X(copy_in_, cuMemcpyHtoDAsync_v2, int(unsigned long long, const void*, size_t, void*))      \
  X(copy_out_, cuMemcpyDtoHAsync_v2, int(void*, unsigned long long, size_t, void*))           \
  X(fill_, cuMemsetD8Async, int(unsigned long long, unsigned char, size_t, void*))            \
  X(create_event_, cuEventCreate, int(void**, unsigned))                                      \
  X(destroy_event_, cuEventDestroy_v2, int(void*))                                            \
  X(record_, cuEventRecord, int(void*, void*))                                                \
  X(elapsed_, cuEventElapsedTime, int(float*, void*, void*))                                  \
  X(load_, cuModuleLoadData, int(void**, const void*))                                        \
  X(unload_, cuModuleUnload, int(void*))                                                      \
  X(function_, cuModuleGetFunction, int(void**, void*, const char*))                          \
  X(set_attribute_, cuFuncSetAttribute, int(void*, int, int))                                 \
  X(launch_, cuLaunchKernel,                                                                  \
    int(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,   \
        void**, void**))                                                                      \
  X(text_, cuGetErrorString, int(int, const char**))

namespace dflash::compute::gpu::cuda {

using Pointer = unsigned long long;  // CUdeviceptr
inline constexpr int kAttributeWarpSize = 10, kAttributeMultiprocessors = 16, kAttributeMajor = 75,
                     kAttributeMinor = 76;
inline constexpr int kFunctionDynamicBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
// CUDA_ERROR_NO_DEVICE, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
inline constexpr int kNoDevice = 100, kDriverMismatch = 803;
inline constexpr unsigned kNonBlockingStream = 1;  // CU_STREAM_NON_BLOCKING
// CU_MEMHOSTREGISTER_*
inline constexpr unsigned kRegisterPortable = 1, kRegisterDeviceMap = 2, kRegisterReadOnly = 8;

}  // namespace dflash::compute::gpu::cuda
