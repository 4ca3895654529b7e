// The thin layer under the kernels: the same names for nvcc, hipcc (clang -x hip) and the simulator
// (DFLASH_GPU_SIM). Sub-groups are 32 lanes everywhere, half a wave on wave64 hardware. Float
// arithmetic goes through fused, add, sub, mul, div: one IEEE operation each, rounded to nearest.
// Build with -fmad=false (nvcc) or -ffp-contract=off (clang, g++), so that none are merged behind
// our back.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(DFLASH_GPU_SIM)
#include <cmath>

#include "cards/sim/thread_view.h"
#define GPU_FN inline
#elif defined(__HIP__) || defined(__HIPCC__)
#include <hip/hip_runtime.h>
#define GPU_FN __device__ __forceinline__
#elif defined(__CUDACC__)
#include <cuda_runtime.h>
#define GPU_FN __device__ __forceinline__
#else
#error "kernels are compiled by nvcc, by hipcc, or for the simulator with DFLASH_GPU_SIM"
#endif

// GPU_KERNEL(name, Params, most_threads)(params) { ... }: a kernel of at most that many threads per
// block, one parameter by value. GPU_PAIRED_KERNEL: one of which two blocks of 256 threads fit a
// multiprocessor of NVIDIA's, 128 registers a thread: left alone, the compiler takes more, or
// spills to take fewer. GPU_SHARED(Type, name): an object of a trivial type that the threads of a
// block share; contents undefined. GPU_DYNAMIC_SHARED(name): a pointer to the shared memory that
// the launch asked for (KernelEntry), aligned to 16 bytes.
#if defined(DFLASH_GPU_SIM)
#define GPU_KERNEL(name, Params, most_threads) void name(const Params& params)
#define GPU_PAIRED_KERNEL GPU_KERNEL
#define GPU_SHARED(Type, name)      \
  Type& name = *static_cast<Type*>( \
      ::dflash::compute::gpu::sim::shared_object(sizeof(Type), {__FILE__, __LINE__}))
#define GPU_DYNAMIC_SHARED(name) \
  void* const name = ::dflash::compute::gpu::sim::dynamic_shared({__FILE__, __LINE__})
#define GPU_UNROLL
#define GPU_UNROLL_4
#define GPU_SITE_FIRST const char *file = __builtin_FILE(), unsigned line = __builtin_LINE()
#define GPU_SITE , GPU_SITE_FIRST
#else
#define GPU_KERNEL(name, Params, most_threads) \
  extern "C" __global__ void __launch_bounds__(most_threads) name(const Params params)
#if defined(__HIP__) || defined(__HIPCC__)
#define GPU_PAIRED_KERNEL GPU_KERNEL
#else
#define GPU_PAIRED_KERNEL(name, Params, most_threads) \
  extern "C" __global__ void __launch_bounds__(most_threads, 2) name(const Params params)
#endif
#define GPU_SHARED(Type, name) __shared__ Type name
#define GPU_DYNAMIC_SHARED(name)             \
  extern __shared__ uint4 dflash_dynamic_[]; \
  void* const name = dflash_dynamic_
#define GPU_UNROLL _Pragma("unroll")
#define GPU_UNROLL_4 _Pragma("unroll 4")
#define GPU_SITE_FIRST
#define GPU_SITE
#endif

namespace dflash::compute::gpu {

inline constexpr uint32_t kSubgroupLanes = 32;

// An array in shared memory; the simulator checks indices.
template <class T, uint32_t kCount>
struct SharedArray {
  alignas(16) T elements[kCount];
#if defined(DFLASH_GPU_SIM)
  T& at(uint32_t index GPU_SITE) {
    if (index >= kCount) sim::out_of_bounds(index, kCount, {file, line});
    return elements[index];
  }
#else
  GPU_FN T& at(uint32_t index) { return elements[index]; }
#endif
};

#if defined(DFLASH_GPU_SIM)

GPU_FN uint32_t thread_index() { return sim::thread_place().thread; }
GPU_FN uint32_t block_threads() { return sim::thread_place().num_threads; }
GPU_FN uint32_t block_x() { return sim::thread_place().block_x; }
GPU_FN uint32_t block_y() { return sim::thread_place().block_y; }
GPU_FN uint32_t grid_x() { return sim::thread_place().grid_x; }
GPU_FN void sync_block(GPU_SITE_FIRST) { sim::block_barrier({file, line}); }
GPU_FN void sync_subgroup(GPU_SITE_FIRST) {
  sim::subgroup_collective(sim::Collective::kBarrier, 0, 0, {file, line});
}
GPU_FN uint32_t shuffle(uint32_t value, uint32_t lane GPU_SITE) {
  return static_cast<uint32_t>(
      sim::subgroup_collective(sim::Collective::kShuffle, value, lane, {file, line}));
}
GPU_FN uint32_t ballot(bool is_set GPU_SITE) {
  return static_cast<uint32_t>(
      sim::subgroup_collective(sim::Collective::kBallot, is_set, 0, {file, line}));
}
GPU_FN uint32_t count_bits(uint32_t bits) {
  return static_cast<uint32_t>(__builtin_popcount(bits));
}
// of one at least
GPU_FN uint32_t lowest_bit(uint32_t bits) { return static_cast<uint32_t>(__builtin_ctz(bits)); }
GPU_FN void atomic_min(uint64_t* at, uint64_t value) {
  if (value < *at) *at = value;  // one thread runs at a time
}
GPU_FN uint32_t load_acquire_system(const uint32_t* at) {
  sim::pause_thread();  // loops over this must let others go on
  const uint32_t value = __atomic_load_n(at, __ATOMIC_ACQUIRE);
  sim::note_acquire(at);
  return value;
}
GPU_FN void store_release_system(uint32_t* at, uint32_t value) {
  sim::note_release(at);
  __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
GPU_FN void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
GPU_FN void atomic_set_once(uint64_t* at, uint64_t value) {
  if (*at == 0) *at = value;  // one thread runs at a time
}
GPU_FN uint64_t device_ns() { return sim::clock_ns(); }
GPU_FN float fused(float a, float b, float c) { return std::fma(a, b, c); }
GPU_FN float add(float a, float b) { return a + b; }
GPU_FN float sub(float a, float b) { return a - b; }
GPU_FN float mul(float a, float b) { return a * b; }
GPU_FN float div(float a, float b) { return a / b; }
GPU_FN uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
GPU_FN float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

#else

GPU_FN uint32_t thread_index() { return threadIdx.x; }
GPU_FN uint32_t block_threads() { return blockDim.x; }
GPU_FN uint32_t block_x() { return blockIdx.x; }
GPU_FN uint32_t block_y() { return blockIdx.y; }
GPU_FN uint32_t grid_x() { return gridDim.x; }
GPU_FN void sync_block() { __syncthreads(); }
GPU_FN uint32_t count_bits(uint32_t bits) { return static_cast<uint32_t>(__popc(bits)); }
// of one at least
GPU_FN uint32_t lowest_bit(uint32_t bits) {
  return static_cast<uint32_t>(__ffs(static_cast<int>(bits)) - 1);
}
GPU_FN void atomic_min(uint64_t* at, uint64_t value) {
  atomicMin(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(value));
}
GPU_FN void fence_system() { __threadfence_system(); }
// The first value that is not 0 stays.
GPU_FN void atomic_set_once(uint64_t* at, uint64_t value) {
  atomicCAS(reinterpret_cast<unsigned long long*>(at), 0ull,
            static_cast<unsigned long long>(value));
}
GPU_FN float add(float a, float b) { return __fadd_rn(a, b); }
GPU_FN float sub(float a, float b) { return __fsub_rn(a, b); }
GPU_FN float mul(float a, float b) { return __fmul_rn(a, b); }
GPU_FN uint32_t bits_of(float value) { return __float_as_uint(value); }
GPU_FN float float_of(uint32_t bits) { return __uint_as_float(bits); }

#if defined(__HIP__) || defined(__HIPCC__)
// A wave executes in lock step: only the compiler must be kept from moving memory accesses across.
GPU_FN void sync_subgroup() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}
GPU_FN uint32_t shuffle(uint32_t value, uint32_t lane) {
  return static_cast<uint32_t>(__shfl(static_cast<int>(value), static_cast<int>(lane), 32));
}
GPU_FN uint32_t ballot(bool is_set) {
  const uint64_t wave = __ballot(is_set);
  return static_cast<uint32_t>(__lane_id() >= 32 ? wave >> 32 : wave);  // this half of a wave64
}
GPU_FN uint32_t load_acquire_system(const uint32_t* at) {
  return __hip_atomic_load(at, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
GPU_FN void store_release_system(uint32_t* at, uint32_t value) {
  __hip_atomic_store(at, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
// 100 MHz, or slower on older cards: a bound, no measure
GPU_FN uint64_t device_ns() { return static_cast<uint64_t>(wall_clock64()) * 10; }
GPU_FN float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// correctly rounded unless the build asks otherwise
GPU_FN float div(float a, float b) { return a / b; }
#else
GPU_FN void sync_subgroup() { __syncwarp(); }
GPU_FN uint32_t shuffle(uint32_t value, uint32_t lane) {
  return __shfl_sync(0xffffffffu, value, static_cast<int>(lane));
}
GPU_FN uint32_t ballot(bool is_set) { return __ballot_sync(0xffffffffu, is_set); }
GPU_FN uint32_t load_acquire_system(const uint32_t* at) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700  // without a memory model in the instructions
  const uint32_t value = *static_cast<const volatile uint32_t*>(at);
  __threadfence_system();
#else
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
#endif
  return value;
}
GPU_FN void store_release_system(uint32_t* at, uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
  __threadfence_system();
  *static_cast<volatile uint32_t*>(at) = value;
#else
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
#endif
}
GPU_FN uint64_t device_ns() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}
GPU_FN float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
GPU_FN float div(float a, float b) { return __fdiv_rn(a, b); }
#endif
#endif

// sum + a[0] * b[0] + ... + a[3] * b[3] over signed bytes, in integers.
GPU_FN int32_t dot4(uint32_t a, uint32_t b, int32_t sum) {
#if defined(DFLASH_GPU_SIM) || defined(__gfx900__) || defined(__gfx1010__) || \
    (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 610)
  for (uint32_t shift = 0; shift < 32; shift += 8) {
    sum += static_cast<int32_t>(static_cast<int8_t>(a >> shift & 0xffu)) *
           static_cast<int8_t>(b >> shift & 0xffu);
  }
  return sum;
#elif defined(__GFX11__) || defined(__GFX12__)
  return __builtin_amdgcn_sudot4(true, static_cast<int>(a), true, static_cast<int>(b), sum, false);
#elif defined(__HIP__) || defined(__HIPCC__)
  return __builtin_amdgcn_sdot4(static_cast<int>(a), static_cast<int>(b), sum, false);
#else
  return __dp4a(static_cast<int>(a), static_cast<int>(b), sum);
#endif
}

// Byte i of the result is byte selectors[i] (each 0..7) of the eight in `low` and `high`.
#if defined(DFLASH_GPU_SIM)
GPU_FN uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t selectors) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t picked = 0;
  for (uint32_t shift = 0; shift < 32; shift += 8)
    picked |= static_cast<uint32_t>(bytes >> ((selectors >> shift & 7u) * 8) & 0xffu) << shift;
  return picked;
}
#elif defined(__HIP__) || defined(__HIPCC__)
GPU_FN uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t selectors) {
  return __builtin_amdgcn_perm(high, low, selectors);
}
#else
GPU_FN uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t selectors) {
  const uint32_t pairs = selectors | selectors >> 4;  // the instruction takes a nibble per byte
  return __byte_perm(low, high, __byte_perm(pairs, 0, 0x4420));
}
#endif

// Ends the kernel with an error of the device: it was compiled for hardware that lacks what it
// needs.
GPU_FN void stop_kernel() {
#if defined(__CUDA_ARCH__)
  __trap();
#elif !defined(DFLASH_GPU_SIM)
  __builtin_trap();
#endif
}

GPU_FN uint32_t lane_index() { return thread_index() % kSubgroupLanes; }
GPU_FN uint32_t subgroup_index() { return thread_index() / kSubgroupLanes; }

// 16 bytes at a 16-byte boundary, in one access.
struct alignas(16) Unit {
  uint32_t words[4];
};
struct alignas(16) Float4 {
  float values[4];
};
template <class T>
GPU_FN T load_16(const void* at) {
#if defined(DFLASH_GPU_SIM)
  T value;
  std::memcpy(&value, __builtin_assume_aligned(at, 16), sizeof(value));
  return value;
#else
  const uint4 words = *static_cast<const uint4*>(at);
  T value;
  __builtin_memcpy(&value, &words, sizeof(value));
  return value;
#endif
}

// The same of device memory, and a word of it. Where compilers for AMD's cards cannot tell that
// from the pointer (a null among its values is enough) they take an instruction for both memories,
// and every wait for shared memory is one for these loads too.
#if !defined(DFLASH_GPU_SIM) && (defined(__HIP__) || defined(__HIPCC__))
template <class T>
GPU_FN T load_device_16(const void* at) {
  using Words = uint32_t __attribute__((ext_vector_type(4)));
  const Words words = *(const __attribute__((address_space(1))) Words*)at;
  return __builtin_bit_cast(T, words);
}
GPU_FN uint32_t load_device_word(const void* at) {
  return *(const __attribute__((address_space(1))) uint32_t*)at;
}
#else
template <class T>
GPU_FN T load_device_16(const void* at) {
  return load_16<T>(at);
}
GPU_FN uint32_t load_device_word(const void* at) { return *static_cast<const uint32_t*>(at); }
#endif

}  // namespace dflash::compute::gpu
