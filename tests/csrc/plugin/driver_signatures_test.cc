// The vendors' functions that are called by name, against the vendors' headers where those are
// installed: the same number of arguments and for each the same size and kind, and the values of
// the constants. It is enough that this compiles.
// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#if defined(DFLASH_CUDA_HEADERS)
#include <cuda.h>
#endif
#if __has_include(<hip/hip_runtime_api.h>)
#define DFLASH_HIP_HEADERS
#define __HIP_PLATFORM_AMD__
#define __HIP_DISABLE_CPP_FUNCTIONS__
#include <hip/hip_runtime_api.h>
#endif

#include "cards/cuda/cuda_functions.h"
#include "cards/hip/hip_functions.h"
#include "cards/module/driver_api.h"
#include "plugin/alike_functions.h"

namespace {

#if defined(DFLASH_CUDA_HEADERS)
DFLASH_CUDA_FUNCTIONS(DFLASH_SAME)
namespace cuda = dflash::compute::gpu::cuda;
static_assert(CU_DEVICE_ATTRIBUTE_WARP_SIZE == cuda::kAttributeWarpSize);
static_assert(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT == cuda::kAttributeMultiprocessors);
static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == cuda::kAttributeMajor);
static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR == cuda::kAttributeMinor);
static_assert(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == cuda::kFunctionDynamicBytes);
static_assert(CUDA_ERROR_NO_DEVICE == cuda::kNoDevice &&
              CUDA_ERROR_SYSTEM_DRIVER_MISMATCH == cuda::kDriverMismatch);
static_assert(CU_STREAM_NON_BLOCKING == cuda::kNonBlockingStream &&
              std::is_same_v<CUdeviceptr, cuda::Pointer>);
static_assert(CU_MEMHOSTREGISTER_PORTABLE == cuda::kRegisterPortable &&
              CU_MEMHOSTREGISTER_DEVICEMAP == cuda::kRegisterDeviceMap);
static_assert(CU_MEMHOSTREGISTER_READ_ONLY == cuda::kRegisterReadOnly);
static_assert(CUDA_ERROR_OUT_OF_MEMORY == dflash::compute::gpu::kDriverOutOfMemory);
static_assert(CUDA_ERROR_NOT_READY == dflash::compute::gpu::kDriverNotReady && CUDA_SUCCESS == 0);
#endif
#if defined(DFLASH_HIP_HEADERS)
DFLASH_HIP_FUNCTIONS(DFLASH_SAME)
namespace hip = dflash::compute::gpu::hip;
static_assert(hipErrorNoDevice == hip::kNoDevice && hipErrorInvalidDevice == hip::kInvalidDevice);
static_assert(hipErrorInsufficientDriver == hip::kInsufficientDriver &&
              hipStreamNonBlocking == hip::kNonBlockingStream);
static_assert(hipHostRegisterPortable == hip::kRegisterPortable &&
              hipHostRegisterMapped == hip::kRegisterMapped);
static_assert(hipErrorOutOfMemory == dflash::compute::gpu::kDriverOutOfMemory);
static_assert(hipErrorNotReady == dflash::compute::gpu::kDriverNotReady && hipSuccess == 0);
#endif

}  // namespace
