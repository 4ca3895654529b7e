// Every kernel by number and name: "dflash_" + stem, and per weight format + "_" + the format's
// name ("dflash_project_few_q4_k"). A vendor's module exports exactly these symbols (extern "C");
// the simulator has a table of functions in the same order.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "compute/formats/weight_format.h"

// X(stem) of kernels that do not depend on the weights' format.
// clang-format off: a row per kernel.
#define DFLASH_GPU_PLAIN_KERNELS(X) \
  X(widen_rows) \
  X(narrow_rows) \
  X(quantize_rows) \
  X(halve_rows) \
  X(begin_routing) \
  X(count_pairs) \
  X(list_pairs) \
  X(order_rows) \
  X(combine)
// clang-format on

// X(stem) of kernels that exist per weight format.
#define DFLASH_GPU_WEIGHT_KERNELS(X) \
  X(project_few) X(project_many) X(bf16_few) X(bf16_many) X(bf16_wgmma) X(dot2_few) X(dot2_many)

// X(..., enumerator, name) of the formats that cards take, in the order of WeightFormat. The
// formats with grids are not among them: their entries do not fit a card's record
// (record_layout.h).
#define DFLASH_GPU_FORMATS(X, ...)            \
  X(__VA_ARGS__, kF32, f32)                   \
  X(__VA_ARGS__, kF16, f16)                   \
  X(__VA_ARGS__, kBF16, bf16)                 \
  X(__VA_ARGS__, kInt8G32, int8_g32)          \
  X(__VA_ARGS__, kInt4G32, int4_g32)          \
  X(__VA_ARGS__, kFp8E4m3B128, fp8_e4m3_b128) \
  X(__VA_ARGS__, kMxfp4, mxfp4)               \
  X(__VA_ARGS__, kQ8_0, q8_0)                 \
  X(__VA_ARGS__, kQ4_0, q4_0)                 \
  X(__VA_ARGS__, kQ4K, q4_k)                  \
  X(__VA_ARGS__, kQ5K, q5_k)                  \
  X(__VA_ARGS__, kQ6K, q6_k)                  \
  X(__VA_ARGS__, kGgufMxfp4, gguf_mxfp4)      \
  X(__VA_ARGS__, kIq4Nl, iq4_nl)              \
  X(__VA_ARGS__, kIq4Xs, iq4_xs)              \
  X(__VA_ARGS__, kQ4_1, q4_1)                 \
  X(__VA_ARGS__, kQ5_0, q5_0)                 \
  X(__VA_ARGS__, kQ5_1, q5_1)                 \
  X(__VA_ARGS__, kQ3K, q3_k)                  \
  X(__VA_ARGS__, kQ2K, q2_k)                  \
  X(__VA_ARGS__, kInt4Zp, int4_zp)

// X(stem) of kernels of class int8-groups, which exist per format that the class takes.
#define DFLASH_GPU_INTEGER_KERNELS(X) X(int8_few) X(int8_many)

// X(..., enumerator, name) of those formats.
#define DFLASH_GPU_INTEGER_FORMATS(X, ...) \
  X(__VA_ARGS__, kInt8G32, int8_g32)       \
  X(__VA_ARGS__, kInt4G32, int4_g32)       \
  X(__VA_ARGS__, kMxfp4, mxfp4)            \
  X(__VA_ARGS__, kQ8_0, q8_0)              \
  X(__VA_ARGS__, kQ4_0, q4_0)              \
  X(__VA_ARGS__, kQ4K, q4_k)               \
  X(__VA_ARGS__, kQ5K, q5_k)               \
  X(__VA_ARGS__, kQ6K, q6_k)               \
  X(__VA_ARGS__, kGgufMxfp4, gguf_mxfp4)   \
  X(__VA_ARGS__, kIq4Nl, iq4_nl)           \
  X(__VA_ARGS__, kIq4Xs, iq4_xs)           \
  X(__VA_ARGS__, kQ4_1, q4_1)              \
  X(__VA_ARGS__, kQ5_0, q5_0)              \
  X(__VA_ARGS__, kQ5_1, q5_1)              \
  X(__VA_ARGS__, kQ3K, q3_k)               \
  X(__VA_ARGS__, kQ2K, q2_k)               \
  X(__VA_ARGS__, kInt4Zp, int4_zp)

namespace dflash::compute::gpu {

enum class KernelId : uint16_t {};  // 0 .. kNumKernels - 1, as in expert_kernels()

enum class PlainKernel : uint16_t {
#define DFLASH_GPU_ENUMERATOR(stem) k_##stem,
  DFLASH_GPU_PLAIN_KERNELS(DFLASH_GPU_ENUMERATOR)
};
enum class WeightKernel : uint16_t { DFLASH_GPU_WEIGHT_KERNELS(DFLASH_GPU_ENUMERATOR) };
enum class IntegerKernel : uint16_t { DFLASH_GPU_INTEGER_KERNELS(DFLASH_GPU_ENUMERATOR) };
#undef DFLASH_GPU_ENUMERATOR

#define DFLASH_GPU_COUNT(stem) +1
inline constexpr uint16_t kNumPlainKernels = 0 DFLASH_GPU_PLAIN_KERNELS(DFLASH_GPU_COUNT);
inline constexpr uint16_t kNumWeightKernels = 0 DFLASH_GPU_WEIGHT_KERNELS(DFLASH_GPU_COUNT);
inline constexpr uint16_t kNumIntegerKernels = 0 DFLASH_GPU_INTEGER_KERNELS(DFLASH_GPU_COUNT);
#undef DFLASH_GPU_COUNT
inline constexpr WeightFormat kIntegerFormats[] = {
#define DFLASH_GPU_ENUMERATOR(none, enumerator, name) WeightFormat::enumerator,
    DFLASH_GPU_INTEGER_FORMATS(DFLASH_GPU_ENUMERATOR, )
#undef DFLASH_GPU_ENUMERATOR
};
inline constexpr uint16_t kNumIntegerFormats = sizeof(kIntegerFormats) / sizeof(kIntegerFormats[0]);
inline constexpr WeightFormat kCardFormats[] = {
#define DFLASH_GPU_ENUMERATOR(none, enumerator, name) WeightFormat::enumerator,
    DFLASH_GPU_FORMATS(DFLASH_GPU_ENUMERATOR, )
#undef DFLASH_GPU_ENUMERATOR
};
inline constexpr uint16_t kNumCardFormats = sizeof(kCardFormats) / sizeof(kCardFormats[0]);
inline constexpr uint16_t kFirstIntegerKernel =
    kNumPlainKernels + kNumWeightKernels * kNumCardFormats;
inline constexpr uint16_t kNumKernels =
    kFirstIntegerKernel + kNumIntegerKernels * kNumIntegerFormats;

constexpr KernelId kernel_id(PlainKernel kernel) { return static_cast<KernelId>(kernel); }
// `format` is one of kCardFormats.
constexpr KernelId kernel_id(WeightKernel kernel, WeightFormat format) {
  uint16_t index = 0;
  while (kCardFormats[index] != format) ++index;
  return static_cast<KernelId>(kNumPlainKernels + static_cast<uint16_t>(kernel) * kNumCardFormats +
                               index);
}
// `format` is one of kIntegerFormats.
constexpr KernelId kernel_id(IntegerKernel kernel, WeightFormat format) {
  uint16_t index = 0;
  while (kIntegerFormats[index] != format) ++index;
  return static_cast<KernelId>(kFirstIntegerKernel +
                               static_cast<uint16_t>(kernel) * kNumIntegerFormats + index);
}

}  // namespace dflash::compute::gpu
