// The matrix products of numerics class int8-groups over a vector type V and its integer dot
// products D (int8_codes.h). Each output is summed over blocks of 256 inputs: one chain of fmas per
// block from +0 over its groups, each of which is an exact integer sum, and the block sums added in
// ascending order. Few rows are bound by reading the weights and unfold their codes in registers;
// many rows unfold a block once and pass over it in tiles. Included by kernels_<set>.cc only; no
// std:: code (canonical_products.h says why).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/kernels/expert_tiles.h"
#include "compute/cpu/kernels/int8_codes.h"
#include "compute/cpu/kernels/int8_grids.h"

namespace dflash::compute {

// Whether D multiplies several rows with several outputs in one instruction. Such a D has
// `arrange`, which puts the codes of a block into the order of that instruction.
template <class D>
concept MultipliesMatrices =
    requires(uint8_t* codes, uint32_t num_steps) { D::arrange(codes, num_steps); };

// What a kernel reads of one encoded row: its codes (four bytes a lane for step s of group g), what
// a group's integer sum starts from, and the index of the group's scale.
template <class D, CodeTraits kTraits>
struct Int8Row {
  static constexpr uint32_t kGroups = 32 / (4 * kTraits.steps);  // weight groups per group of a row
  static constexpr int32_t kOffset = kTraits.is_signed ? D::kSignedOffset : kTraits.offset;

  // The codes of four inputs; those of the next step follow them.
  [[gnu::always_inline]] static inline const int8_t* codes(const Int8Block& block, uint32_t group,
                                                           uint32_t step) {
    return (kTraits.is_paired ? block.paired : block.ascending) +
           4 * (group * kTraits.steps + step);
  }
  [[gnu::always_inline]] static inline int32_t word(const Int8Block& block, uint32_t group,
                                                    uint32_t step) {
    int32_t four;
    __builtin_memcpy(&four, codes(block, group, step), sizeof(four));
    return four;
  }
  // Minus the offset of all codes times the sum of the row's, so that the dot product needs no
  // subtraction per code.
  [[gnu::always_inline]] static inline int32_t start(const Int8Block& block, uint32_t group) {
    if constexpr (kOffset == 0)
      return 0;
    else if constexpr (kGroups == 2)
      return -kOffset * block.sums[group];
    else
      return -kOffset * (block.sums[2 * group] + block.sums[2 * group + 1]);
  }
  static constexpr uint32_t scale_index(uint32_t group) { return group / kGroups; }
  // The scale times the sum of the codes that a group of weights meets.
  [[gnu::always_inline]] static inline float scaled_sum(const Int8Block& block, uint32_t group) {
    return kGroups == 2 ? block.scaled_halves[group] : block.scaled_sums[group];
  }
};

// Adds a group to a float sum: sum + dot * (weight scale * row scale), and where the format is
// affine also offset * (row scale * sum of the row's codes).
template <class V, class Row, CodeTraits kTraits>
[[gnu::always_inline]] inline typename V::F add_group(typename V::I dot, typename V::F scale,
                                                      typename V::F minus_offset,
                                                      const Int8Block& block, uint32_t group,
                                                      typename V::F sum) {
  const float row_scale = block.scales[Row::scale_index(group)];
  sum = V::fma(V::to_float(dot), V::mul(scale, V::set1(row_scale)), sum);
  if constexpr (kTraits.is_affine)
    sum = V::fma(minus_offset, V::set1(Row::scaled_sum(block, group)), sum);
  return sum;
}

// The kernel of up to kFewRows rows, in the form that few_rows.h has. The `rows` it receives are
// encoded ones (Int8Block), whatever their type says.
template <class V, class D, WeightFormat kFormat>
struct Int8Kernel {
  using Codes = IntegerCodes<V, D, kFormat>;
  using Row = Int8Row<D, Codes::kTraits>;
  static constexpr PanelLayout kLayout = Codes::kLayout;
  // A group's share of its record, the header included. The shares together cover the stream.
  static constexpr size_t kGroupShare =
      kLayout.record_bytes() * kPanelWidth<V> * kLayout.group_inputs / kLayout.record_inputs;
  // One stream is read faster than two, and the work of groups overlaps well enough with one panel.
  template <int M>
  static constexpr int kPanels = 1;

  static const uint8_t* record_of(const uint8_t* panel, uint32_t k) {
    return panel + k / kLayout.record_inputs * kLayout.record_bytes() * kPanelWidth<V>;
  }

  template <int M, int NP>
  static void chain(const float* const* rows, const Streams& streams, uint32_t k_begin,
                    uint32_t k_end, float* tile, size_t tile_stride) {
    typename V::F sums[M][2 * NP];
    const Int8Block* blocks[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      blocks[m] = reinterpret_cast<const Int8Block*>(rows[m]) + k_begin / kInt8BlockInputs;
#pragma GCC unroll 4
      for (int n = 0; n < 2 * NP; ++n) sums[m][n] = V::set1(0.0f);
    }
    const typename Codes::Tables tables = Codes::tables();
    for (uint32_t k = k_begin; k < k_end; k += kLayout.group_inputs) {
      const uint32_t in_record = k % kLayout.record_inputs / kLayout.group_inputs;
      const uint8_t* at = record_of(streams.first, k) + in_record * kGroupShare;
      const size_t ahead = distance_ahead<kQuantizedAhead>(at, streams);
#pragma GCC unroll 2
      for (int p = 0; p < NP; ++p) {
        const size_t panel = static_cast<size_t>(p) * streams.panel_bytes;
        const Group group{record_of(streams.first + panel, k), in_record,
                          (k - k_begin) / kLayout.group_inputs, at + ahead + panel};
        add_products<M, NP>(tables, group, blocks, p, sums);
      }
    }
    store_sums<V>(sums, k_begin == 0, tile, tile_stride);
  }

  // One group of one panel: its record, its number within the record and within the K block.
  struct Group {
    const uint8_t* record;
    uint32_t in_record;
    uint32_t in_block;
    const uint8_t* ahead;  // what to prefetch meanwhile: a group's share of the stream
  };

  // Prefetches the lines of a group's share that belong to one of its products. The lines are
  // spread evenly, because all of them at once would hold back the loads.
  [[gnu::always_inline]] static inline void fetch_share(const uint8_t* ahead, uint32_t product) {
    constexpr uint32_t kLines = (kGroupShare + 63) / 64, kProducts = 2 * Codes::kTraits.steps;
    if constexpr (kGroupShare >= 256) {
#pragma GCC unroll 64
      // The bounds are constants instead of functions of `product`, which a sanitizer build would
      // not fold.
      for (uint32_t line = 0; line < kLines; ++line) {
        if (product * kLines / kProducts <= line && line < (product + 1) * kLines / kProducts)
          __builtin_prefetch(ahead + size_t{64} * line);
      }
    } else if (product == 0) {
      prefetch<kGroupShare>(ahead);
    }
  }

  // Adds one group of panel p to the sums of M rows.
  template <int M, int NP>
  [[gnu::always_inline]] static inline void add_products(const typename Codes::Tables& tables,
                                                         const Group& group,
                                                         const Int8Block* const (&blocks)[M], int p,
                                                         typename V::F (&sums)[M][2 * NP]) {
    typename V::I dots[M][2];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
      dots[m][0] = dots[m][1] = V::set1i(Row::start(*blocks[m], group.in_block));
    Codes::unfold(tables, group.record, group.in_record,
                  [&](uint32_t s, uint32_t h, typename V::I codes) __attribute__((always_inline)) {
                    fetch_share(group.ahead, 2 * s + h);
#pragma GCC unroll 4
                    for (int m = 0; m < M; ++m) {
                      dots[m][h] = D::template dot<Codes::kTraits.is_signed>(
                          codes, V::set1i(Row::word(*blocks[m], group.in_block, s)), dots[m][h]);
                    }
                  });
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const typename V::F scale = Codes::scale(group.record, group.in_record, h);
      typename V::F minus_offset{};
      if constexpr (Codes::kTraits.is_affine)
        minus_offset = Codes::minus_offset(group.record, group.in_record, h);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        sums[m][2 * p + h] = add_group<V, Row, Codes::kTraits>(
            dots[m][h], scale, minus_offset, *blocks[m], group.in_block, sums[m][2 * p + h]);
      }
    }
  }
};

// One K block of a panel with its codes unfolded. It stays in the first-level cache while all rows
// pass over it.
template <class V>
struct CodeBlock {
  // [group][step][vector]
  alignas(64) uint8_t codes[static_cast<size_t>(kInt8BlockInputs) * kPanelWidth<V>];
  float scales[static_cast<size_t>(16) * kPanelWidth<V>];
  float minus_offsets[static_cast<size_t>(16) * kPanelWidth<V>];  // written by affine formats only
};

// Prefetches `ahead` bytes of the weights that come next.
[[gnu::always_inline]] inline void fetch_next(const uint8_t* next, size_t ahead) {
  for (size_t line = 0; line < ahead; line += 64) __builtin_prefetch(next + line, 0, 2);
}

// Unfolds `num_groups` groups of a panel from input `k_begin` on. For each group, it also
// prefetches `ahead` bytes of the weights that come next, from `next` on.
template <class V, class D, WeightFormat kFormat>
void unfold_block(const uint8_t* panel, uint32_t k_begin, uint32_t num_groups, const uint8_t* next,
                  size_t ahead, CodeBlock<V>& block) {
  using Codes = IntegerCodes<V, D, kFormat>;
  using Kernel = Int8Kernel<V, D, kFormat>;
  const typename Codes::Tables tables = Codes::tables();
  for (uint32_t group = 0; group < num_groups; ++group, next += ahead) {
    fetch_next(next, ahead);
    const uint32_t k = k_begin + group * Codes::kLayout.group_inputs;
    const uint8_t* record = Kernel::record_of(panel, k);
    const uint32_t in_record = k % Codes::kLayout.record_inputs / Codes::kLayout.group_inputs;
    Codes::unfold(tables, record, in_record,
                  [&](uint32_t s, uint32_t h, typename V::I codes) __attribute__((always_inline)) {
                    __builtin_memcpy(block.codes + ((group * Codes::kTraits.steps + s) * 2 + h) *
                                                       Codes::kVectorBytes,
                                     &codes, sizeof(codes));
                  });
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      V::store(block.scales + (2 * group + static_cast<uint32_t>(h)) * V::kLanes,
               Codes::scale(record, in_record, h));
      if constexpr (Codes::kTraits.is_affine) {
        V::store(block.minus_offsets + (2 * group + static_cast<uint32_t>(h)) * V::kLanes,
                 Codes::minus_offset(record, in_record, h));
      }
    }
  }
}

// What all tiles of rows share of one block. For each group, a tile also prefetches `ahead` bytes
// of the weights that come next, from `next` on.
template <class V>
struct Int8Pass {
  const CodeBlock<V>* block;
  uint32_t block_index;
  uint32_t num_groups;
  const uint8_t* next;
  size_t ahead;
};

// The integer sums of M rows over one group of codes that `unfold_block` has written.
template <class V, class D, CodeTraits kTraits, int M>
[[gnu::always_inline]] inline void multiply_group(const uint8_t* codes,
                                                  const Int8Block* const (&blocks)[M],
                                                  uint32_t group, typename V::I (&dots)[M][2]) {
  using Row = Int8Row<D, kTraits>;
  if constexpr (MultipliesMatrices<D>) {
    D::template multiply_group<Row, kTraits.steps, M>(codes, blocks, group, dots);
  } else {
    constexpr size_t kVectorBytes = 4 * V::kLanes;
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) dots[m][0] = dots[m][1] = V::set1i(Row::start(*blocks[m], group));
#pragma GCC unroll 8
    for (uint32_t s = 0; s < kTraits.steps; ++s, codes += 2 * kVectorBytes) {
      const typename V::I first = V::load_words(codes),
                          second = V::load_words(codes + kVectorBytes);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const typename V::I input = V::set1i(Row::word(*blocks[m], group, s));
        dots[m][0] = D::template dot<kTraits.is_signed>(first, input, dots[m][0]);
        dots[m][1] = D::template dot<kTraits.is_signed>(second, input, dots[m][1]);
      }
    }
  }
}

// M rows over one unfolded block of a panel.
template <class V, class D, CodeTraits kTraits, int M>
void int8_tile(const void* const* rows, const Int8Pass<V>& pass, float* tile, size_t tile_stride) {
  using Row = Int8Row<D, kTraits>;
  using F = typename V::F;
  constexpr size_t kVectorBytes = 4 * V::kLanes;
  F sums[M][2];
  const Int8Block* blocks[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    blocks[m] = static_cast<const Int8Block*>(rows[m]) + pass.block_index;
    sums[m][0] = sums[m][1] = V::set1(0.0f);
  }
  const uint8_t* codes = pass.block->codes;
  const uint8_t* next = pass.next;
  for (uint32_t group = 0; group < pass.num_groups; ++group, next += pass.ahead) {
    fetch_next(next, pass.ahead);
    typename V::I dots[M][2];
    multiply_group<V, D, kTraits>(codes, blocks, group, dots);
    codes += kTraits.steps * 2 * kVectorBytes;
#pragma GCC unroll 2
    for (uint32_t h = 0; h < 2; ++h) {
      const size_t at = (size_t{2} * group + h) * V::kLanes;
      const F scale = V::load(pass.block->scales + at);
      F minus_offset{};
      if constexpr (kTraits.is_affine) minus_offset = V::load(pass.block->minus_offsets + at);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        sums[m][h] = add_group<V, Row, kTraits>(dots[m][h], scale, minus_offset, *blocks[m], group,
                                                sums[m][h]);
      }
    }
  }
  store_sums<V>(sums, pass.block_index == 0, tile, tile_stride);
}

template <class V, class D, CodeTraits kTraits>
void int8_tile_of(uint32_t num_rows, const void* const* rows, const Int8Pass<V>& pass, float* tile,
                  size_t tile_stride) {
  static_assert(D::kTileRows <= 6);
#define DFLASH_TILE(M) \
  case M:              \
    return int8_tile<V, D, kTraits, (M) <= D::kTileRows ? (M) : 1>(rows, pass, tile, tile_stride)
  switch (num_rows) {
    DFLASH_TILE(1);
    DFLASH_TILE(2);
    DFLASH_TILE(3);
    DFLASH_TILE(4);
    DFLASH_TILE(5);
    DFLASH_TILE(6);
    default: return;
  }
#undef DFLASH_TILE
}

// Multiplies `num_rows` rows, at most kMaxCallRows, with a run of panels into
// tile [num_rows][num_panels * panel_width].
template <class V, class D, WeightFormat kFormat>
void int8_run_many(uint32_t num_rows, const PanelRun& run, const void* const* rows, float* tile) {
  using Kernel = Int8Kernel<V, D, kFormat>;
  constexpr PanelLayout kLayout = Kernel::kLayout;
  CodeBlock<V> block;
  const size_t stride = static_cast<size_t>(run.num_panels) * kPanelWidth<V>;
  const uint32_t num_tiles = (num_rows + D::kTileRows - 1) / D::kTileRows;
  for (uint32_t p = 0; p < run.num_panels; ++p) {
    const uint8_t* panel = reinterpret_cast<const uint8_t*>(run.first) + p * run.panel_bytes;
    for (uint32_t k = 0; k < run.num_inputs; k += kChainLength) {
      const uint32_t count = run.num_inputs - k < kChainLength ? run.num_inputs - k : kChainLength;
      const uint32_t num_groups = (count + kLayout.group_inputs - 1) / kLayout.group_inputs;
      // The next block follows in memory. Unfolding and each tile fetch a share of it, so that
      // memory is never idle.
      const uint8_t* next = Kernel::record_of(panel, k) + num_groups * Kernel::kGroupShare;
      const size_t ahead = Kernel::kGroupShare / (num_tiles + 1);
      unfold_block<V, D, kFormat>(panel, k, num_groups, next, ahead, block);
      if constexpr (MultipliesMatrices<D>)
        D::arrange(block.codes, num_groups * Kernel::Codes::kTraits.steps);
      Int8Pass<V> pass{&block, k / kChainLength, num_groups, next + num_groups * ahead, ahead};
      for (uint32_t t = 0, row = 0; t < num_tiles; ++t, pass.next += num_groups * pass.ahead) {
        const uint32_t size = num_rows / num_tiles + (t < num_rows % num_tiles ? 1 : 0);
        int8_tile_of<V, D, Kernel::Codes::kTraits>(
            size, rows + row, pass, tile + row * stride + p * kPanelWidth<V>, stride);
        row += size;
      }
    }
  }
}

// The two kernels of one resident format.
template <class V>
struct Int8FormatKernels {
  void (*few)(uint32_t num_rows, const PanelRun& run, const float* const* rows, float* tile);
  void (*many)(uint32_t num_rows, const PanelRun& run, const void* const* rows, float* tile);
};

template <class V, class D, WeightFormat kFormat>
constexpr Int8FormatKernels<V> int8_format_kernels() {
  return {run_few<V, Int8Kernel<V, D, kFormat>>, int8_run_many<V, D, kFormat>};
}

template <class V, class D>
inline constexpr Int8FormatKernels<V> kInt8FormatKernels[kNumWeightFormats] = {
    {nullptr, nullptr}, // floats and fp8 have no integer codes
    {nullptr, nullptr},
    {nullptr, nullptr},
    int8_format_kernels<V, D, WeightFormat::kInt8G32>(),
    int8_format_kernels<V, D, WeightFormat::kInt4G32>(),
    {nullptr, nullptr},
    int8_format_kernels<V, D, WeightFormat::kMxfp4>(),
    int8_format_kernels<V, D, WeightFormat::kQ8_0>(),
    int8_format_kernels<V, D, WeightFormat::kQ4_0>(),
    int8_format_kernels<V, D, WeightFormat::kQ4K>(),
    int8_format_kernels<V, D, WeightFormat::kQ5K>(),
    int8_format_kernels<V, D, WeightFormat::kQ6K>(),
    // gguf_mxfp4 differs from mxfp4 in its files only; panels of both are equal.
    int8_format_kernels<V, D, WeightFormat::kMxfp4>(),
    int8_format_kernels<V, D, WeightFormat::kIq4Nl>(),
    int8_format_kernels<V, D, WeightFormat::kIq4Xs>(),
    int8_format_kernels<V, D, WeightFormat::kQ4_1>(),
    int8_format_kernels<V, D, WeightFormat::kQ5_0>(),
    int8_format_kernels<V, D, WeightFormat::kQ5_1>(),
    int8_format_kernels<V, D, WeightFormat::kIq3Xxs>(),
    int8_format_kernels<V, D, WeightFormat::kIq3S>(),
    int8_format_kernels<V, D, WeightFormat::kIq2Xxs>(),
    int8_format_kernels<V, D, WeightFormat::kIq2Xs>(),
    int8_format_kernels<V, D, WeightFormat::kIq2S>(),
    {nullptr, nullptr}, // the formats without panels
    {nullptr, nullptr},
    {nullptr, nullptr},
    {nullptr, nullptr},
    {nullptr, nullptr},
    int8_format_kernels<V, D, WeightFormat::kQ3K>(),
    int8_format_kernels<V, D, WeightFormat::kQ2K>(),
    int8_format_kernels<V, D, WeightFormat::kInt4Zp>(),
};

// The products P that expert_tiles.h asks for.
template <class V, class D>
struct Int8Products {
  static constexpr NumericsClass kNumerics = NumericsClass::kInt8Groups;
  static constexpr size_t (*kEncodedBytes)(uint32_t) = int8_row_bytes<V>;
  static constexpr void (*kEncode)(const float*, uint32_t, std::byte*) = encode_int8_row<V>;
  static constexpr bool kGateUpEncodes = false;  // an Int8Block spans several panels

  static void store(typename V::F values, void* row, size_t column) {
    V::store(static_cast<float*>(row) + column, values);
  }

  static void multiply(uint32_t num_rows, const PanelRun& run, const void* const* rows,
                       float* tile) {
    const Int8FormatKernels<V>& kernels =
        kInt8FormatKernels<V, D>[static_cast<uint8_t>(run.format)];
    if (num_rows <= kFewRows)
      kernels.few(num_rows, run, reinterpret_cast<const float* const*>(rows), tile);
    else
      kernels.many(num_rows, run, rows, tile);
  }
};

template <class V, class D>
constexpr KernelSet make_int8_set() {
  return make_kernel_set<V, Int8Products<V, D>>();
}

}  // namespace dflash::compute
