// The functions and values of HIP that are used, the same in ROCm 5, 6 and 7: handles and
// enumerations by their size. A test compares them with the vendor's header where one is installed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

// X(member, name, type)
#define DFLASH_HIP_FUNCTIONS(X)                                                             \
  X(init_, hipInit, int(unsigned))                                                          \
  X(count_, hipGetDeviceCount, int(int*))                                                   \
  X(device_, hipDeviceGet, int(int*, int))                                                  \
  X(name_, hipDeviceGetName, int(char*, int, int))                                          \
  X(total_, hipDeviceTotalMem, int(size_t*, int))                                           \
  X(set_device_, hipSetDevice, int(int))                                                    \
  X(get_device_, hipGetDevice, int(int*))                                                   \
  X(memory_, hipMemGetInfo, int(size_t*, size_t*))                                          \
  X(allocate_, hipMalloc, int(void**, size_t))                                              \
  X(release_, hipFree, int(void*))                                                          \
  X(allocate_host_, hipHostMalloc, int(void**, size_t, unsigned))                           \
  X(release_host_, hipHostFree, int(void*))                                                 \
  X(register_, hipHostRegister, int(void*, size_t, unsigned))                               \
  X(unregister_, hipHostUnregister, int(void*))                                             \
  X(device_pointer_, hipHostGetDevicePointer, int(void**, void*, unsigned))                 \
  X(create_stream_, hipStreamCreateWithFlags, int(void**, unsigned))                        \
  X(destroy_stream_, hipStreamDestroy, int(void*))                                          \
  X(query_, hipStreamQuery, int(void*))                                                     \
  X(copy_in_, hipMemcpyHtoDAsync, int(void*, void*, size_t, void*))                         \
  X(copy_out_, hipMemcpyDtoHAsync, int(void*, void*, size_t, void*))                        \
  X(fill_, hipMemsetD8Async, int(void*, unsigned char, size_t, void*))                      \
  X(create_event_, hipEventCreateWithFlags, int(void**, unsigned))                          \
  X(destroy_event_, hipEventDestroy, int(void*))                                            \
  X(record_, hipEventRecord, int(void*, void*))                                             \
  X(elapsed_, hipEventElapsedTime, int(float*, void*, void*))                               \
  X(load_, hipModuleLoadData, int(void**, const void*))                                     \
  X(unload_, hipModuleUnload, int(void*))                                                   \
  X(function_, hipModuleGetFunction, int(void**, void*, const char*))                       \
  X(launch_, hipModuleLaunchKernel,                                                         \
    int(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, \
        void**, void**))                                                                    \
  X(text_, hipGetErrorString, const char*(int))                                             \
  X(last_error_, hipGetLastError, int())                                                    \
  X(bus_id_, hipDeviceGetPCIBusId, int(char*, int, int))

namespace dflash::compute::gpu::hip {

// hipErrorNoDevice, hipErrorInvalidDevice
inline constexpr int kNoDevice = 100, kInvalidDevice = 101;
inline constexpr int kInsufficientDriver = 35;     // hipErrorInsufficientDriver
inline constexpr unsigned kNonBlockingStream = 1;  // hipStreamNonBlocking
// hipHostRegisterPortable, hipHostRegisterMapped
inline constexpr unsigned kRegisterPortable = 1, kRegisterMapped = 2;
// hipHostRegisterReadOnly; runtimes before it refuse
inline constexpr unsigned kRegisterReadOnly = 8;

}  // namespace dflash::compute::gpu::hip
