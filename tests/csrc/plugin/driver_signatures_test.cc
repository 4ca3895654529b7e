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

#include "compute/gpu/cuda/cuda_functions.h"
#include "compute/gpu/hip/hip_functions.h"
#include "compute/gpu/module/driver_api.h"

namespace {

// Handles are pointers to whatever the vendor calls it; behind a pointer, numbers count.
template <class Ours, class Theirs>
constexpr bool is_alike() {
  if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    using Our = std::remove_cv_t<std::remove_pointer_t<Ours>>;
    using Their = std::remove_cv_t<std::remove_pointer_t<Theirs>>;
    constexpr bool is_number = std::is_scalar_v<Our> && std::is_scalar_v<Their>;
    if constexpr (is_number) return is_alike<Our, Their>();
    return true;
  } else {
    return sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
           std::is_floating_point_v<Ours> == std::is_floating_point_v<Theirs>;
  }
}
template <class Ours, class Theirs>
struct Alike : std::false_type {};
template <class R, class... A, class S, class... B>
  requires(sizeof...(A) == sizeof...(B))
struct Alike<R(A...), S(B...)> : std::bool_constant<is_alike<R, S>() && (is_alike<A, B>() && ...)> {
};

static_assert(Alike<int(void*, size_t), int(char*, unsigned long)>::value);
static_assert(!Alike<int(void*, size_t), int(void*, unsigned)>::value &&
              !Alike<int(size_t*), int(int*)>::value);
static_assert(!Alike<int(void*), int(void*, int)>::value && !Alike<int(float*), int(int**)>::value);

#define DFLASH_SAME(member, name, type)                                       \
  static_assert(Alike<type, std::remove_pointer_t<decltype(&::name)>>::value, \
                "the vendor's " #name " has other arguments");
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
