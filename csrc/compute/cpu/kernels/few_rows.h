// The products of up to kFewRows rows with a run of panels. Weights are widened or dequantised in
// registers as they come from memory, whose bandwidth bounds these kernels. They are written once,
// over a vector type V, and are part of canonical_products.h, so there is no std:: code here.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/kernel_set.h"
#include "compute/cpu/kernels/quantized_formats.h"

namespace dflash::compute {

// A panel is two vectors wide.
template <class V>
inline constexpr int kPanelWidth = 2 * V::kLanes;

// How many panels are multiplied at once: as many as the vector registers for sums allow, so that
// also with few rows enough independent fmas are under way to hide their latency.
template <class V>
constexpr int panels_at_once(int num_rows) {
  return 8 * num_rows <= V::kAccumulators ? 4 : 4 * num_rows <= V::kAccumulators ? 2 : 1;
}

// How many bytes ahead of their use the weights of a panel are prefetched. Memory with 40 GB/s and
// a latency of 100 ns has 4 KiB under way; the distance is larger because the arithmetic of a group
// holds back the loads of the next. It was chosen among 1 to 8 KiB by measuring on Zen 5.
template <int NP>
inline constexpr size_t kFloatAhead = 8192 / NP;
inline constexpr size_t kQuantizedAhead = 8192;

// Panels that are read side by side, each of which is a stream of memory. What lies behind the end
// of a panel is its neighbour, which is being read already, so the prefetches of a stream that
// reached the end of its panel go on `jump` bytes further.
struct Streams {
  const uint8_t* first;  // the first panel; the others follow `panel_bytes` apart
  size_t panel_bytes;
  size_t jump;  // bytes, modulo 2^64: it may point backwards
};

// How far from `at` to prefetch while `at`, in the first panel, is read.
template <size_t kAhead>
[[gnu::always_inline]] inline size_t distance_ahead(const uint8_t* at, const Streams& streams) {
  const size_t offset = static_cast<size_t>(at - streams.first) + kAhead;
  return kAhead + (offset >= streams.panel_bytes ? streams.jump : 0);
}

// Prefetches the lines of `kBytes` bytes.
template <size_t kBytes>
[[gnu::always_inline]] inline void prefetch(const void* from) {
  // Shorter steps, of one lane, are bound by arithmetic and need none.
  if constexpr (kBytes >= 32) {
    for (size_t line = 0; line < kBytes; line += 64)
      __builtin_prefetch(static_cast<const char*>(from) + line);
  }
}

// Adds the sums over one block of inputs to `tile`, or stores them where that block is the first.
template <class V, int M, int N>
[[gnu::always_inline]] inline void store_sums(const typename V::F (&sums)[M][N], bool is_first,
                                              float* tile, size_t tile_stride) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      float* at = tile + static_cast<size_t>(m) * tile_stride + static_cast<size_t>(n) * V::kLanes;
      V::store(at, is_first ? sums[m][n] : V::add(V::load(at), sums[m][n]));
    }
  }
}

// The kernel for weights that are floats of any width, [input][output].
template <class V, class W>
struct FloatKernel {
  template <int M>
  static constexpr int kPanels = panels_at_once<V>(M);

  // One K block of NP panels: a chain of fmas per output over inputs [k_begin, k_end).
  template <int M, int NP>
  static void chain(const float* const* rows, const Streams& streams, uint32_t k_begin,
                    uint32_t k_end, float* tile, size_t tile_stride) {
    using F = typename V::F;
    F sums[M][2 * NP];
    const float* inputs[M];
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      inputs[m] = rows[m];
#pragma GCC unroll 8
      for (int n = 0; n < 2 * NP; ++n) sums[m][n] = V::set1(0.0f);
    }
    const size_t ahead = distance_ahead<kFloatAhead<NP>>(
        streams.first + k_begin * sizeof(W) * kPanelWidth<V>, streams);
#pragma GCC unroll 2
    for (size_t k = k_begin; k < k_end; ++k) {
#pragma GCC unroll 4
      for (int p = 0; p < NP; ++p) {
        F weights[2];
        const W* step = reinterpret_cast<const W*>(streams.first +
                                                   static_cast<size_t>(p) * streams.panel_bytes) +
                        k * kPanelWidth<V>;
        prefetch<sizeof(W) * kPanelWidth<V>>(reinterpret_cast<const char*>(step) + ahead);
        V::load_weights(step, weights);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          const F input = V::set1(inputs[m][k]);
          sums[m][2 * p] = V::fma(weights[0], input, sums[m][2 * p]);
          sums[m][2 * p + 1] = V::fma(weights[1], input, sums[m][2 * p + 1]);
        }
      }
    }
    store_sums<V>(sums, k_begin == 0, tile, tile_stride);
  }
};

// The kernel for weights in records and groups, read as format Q has them (quantized_formats.h).
template <class V, class Q, WeightFormat kFormat>
struct QuantizedKernel {
  static constexpr PanelLayout kLayout = panel_layout(kFormat);
  // Registers also hold scales, offsets, codes and tables, so that panels are fewer than for
  // floats.
  template <int M>
  static constexpr int kPanels = M <= 2 && 4 * M <= V::kAccumulators ? 2 : 1;

  static const uint8_t* record_of(const uint8_t* panel, uint32_t k) {
    return panel + k / kLayout.record_inputs * kLayout.record_bytes() * kPanelWidth<V>;
  }

  // Multiplies M rows with NP panels over inputs [k_begin, k_end), which are one K block, and adds
  // the sums to `tile`, or stores them where it is the first block. Weights are opened a group at a
  // time; the end of the matrix may cut the last one short.
  template <int M, int NP>
  static void chain(const float* const* rows, const Streams& streams, uint32_t k_begin,
                    uint32_t k_end, float* tile, size_t tile_stride) {
    using F = typename V::F;
    F sums[M][2 * NP];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < 2 * NP; ++n) sums[m][n] = V::set1(0.0f);
    }
    for (uint32_t k = k_begin; k < k_end; k += kLayout.group_inputs) {
      typename Q::Group groups[NP];
      // A group's share of its record, the header included. The shares of all steps together cover
      // the stream, so that each line is prefetched once.
      constexpr size_t kGroupShare =
          kLayout.record_bytes() * kPanelWidth<V> * kLayout.group_inputs / kLayout.record_inputs;
      constexpr size_t kStepShare = kGroupShare * Q::kStep / kLayout.group_inputs;
      const uint8_t* stream = record_of(streams.first, k) +
                              k % kLayout.record_inputs / kLayout.group_inputs * kGroupShare;
#pragma GCC unroll 2
      for (int p = 0; p < NP; ++p) {
        const uint8_t* record =
            record_of(streams.first + static_cast<size_t>(p) * streams.panel_bytes, k);
        groups[p] = Q::open(record, k % kLayout.record_inputs / kLayout.group_inputs);
      }
      const uint32_t count = k_end - k < kLayout.group_inputs ? k_end - k : kLayout.group_inputs;
      uint32_t s = 0;
      for (; (s + 1) * Q::kStep <= count; ++s) {
#pragma GCC unroll 2
        for (int p = 0; p < NP; ++p) {
          const uint8_t* at = stream + s * kStepShare;
          prefetch<kStepShare>(at + distance_ahead<kQuantizedAhead>(at, streams) +
                               static_cast<size_t>(p) * streams.panel_bytes);
        }
        add_step<M, NP, Q::kStep>(groups, s, rows, k + s * Q::kStep, sums);
      }
      for (uint32_t j = 0; j < count - s * Q::kStep; ++j)
        add_input<M, NP>(groups, s, j, rows, k + s * Q::kStep + j, sums);
    }
    store_sums<V>(sums, k_begin == 0, tile, tile_stride);
  }

  // Adds the inputs of one whole step; unrolled, so that every shift is by a constant.
  template <int M, int NP, uint32_t kInputs>
  [[gnu::always_inline]] static inline void add_step(const typename Q::Group (&groups)[NP],
                                                     uint32_t s, const float* const* rows, size_t k,
                                                     typename V::F (&sums)[M][2 * NP]) {
    typename Q::Step steps[NP];
#pragma GCC unroll 2
    for (int p = 0; p < NP; ++p) steps[p] = Q::step(groups[p], s);
#pragma GCC unroll 16
    for (uint32_t j = 0; j < kInputs; ++j) {
#pragma GCC unroll 2
      for (int p = 0; p < NP; ++p) {
        typename V::F weights[2];
        Q::weights(groups[p], steps[p], j, weights);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          const typename V::F input = V::set1(rows[m][k + j]);
          sums[m][2 * p] = V::fma(weights[0], input, sums[m][2 * p]);
          sums[m][2 * p + 1] = V::fma(weights[1], input, sums[m][2 * p + 1]);
        }
      }
    }
  }

  // Adds one input of a step that the end of the matrix cuts short.
  template <int M, int NP>
  [[gnu::always_inline]] static inline void add_input(const typename Q::Group (&groups)[NP],
                                                      uint32_t s, uint32_t j,
                                                      const float* const* rows, size_t k,
                                                      typename V::F (&sums)[M][2 * NP]) {
    for (int p = 0; p < NP; ++p) {
      typename V::F weights[2];
      Q::weights(groups[p], Q::step(groups[p], s), j, weights);
      for (int m = 0; m < M; ++m) {
        const typename V::F input = V::set1(rows[m][k]);
        sums[m][2 * p] = V::fma(weights[0], input, sums[m][2 * p]);
        sums[m][2 * p + 1] = V::fma(weights[1], input, sums[m][2 * p + 1]);
      }
    }
  }
};

// All K blocks of NP panels. Panels are the outer loop, so that the weights are read in one
// ascending stream.
template <class V, class Kernel, int M, int NP>
inline void run_panels(const PanelRun& run, const Streams& streams, const float* const* rows,
                       float* tile, size_t stride) {
  for (uint32_t k = 0; k < run.num_inputs; k += kChainLength) {
    const uint32_t end = run.num_inputs - k < kChainLength ? run.num_inputs : k + kChainLength;
    Kernel::template chain<M, NP>(rows, streams, k, end, tile, stride);
  }
}

// The streams of NP panels from panel p of a run on. Behind its last panels the streams go on with
// the run that this thread reads next, where the caller knows it.
template <int NP>
[[gnu::always_inline]] inline Streams streams_from(const PanelRun& run, uint32_t p) {
  const uint8_t* first = reinterpret_cast<const uint8_t*>(run.first) + p * run.panel_bytes;
  const bool is_last = p + NP >= run.num_panels && run.next != nullptr;
  const uint8_t* then =
      is_last ? reinterpret_cast<const uint8_t*>(run.next) : first + NP * run.panel_bytes;
  return {first, run.panel_bytes,
          reinterpret_cast<uintptr_t>(then) - reinterpret_cast<uintptr_t>(first) - run.panel_bytes};
}

// Multiplies M rows with a whole run of panels into tile [M][num_panels * panel_width].
template <class V, class Kernel, int M>
void run_few_of(const PanelRun& run, const float* const* rows, float* tile) {
  constexpr int kAtOnce = Kernel::template kPanels<M>;
  const size_t stride = static_cast<size_t>(run.num_panels) * kPanelWidth<V>;
  uint32_t p = 0;
  for (; p + kAtOnce <= run.num_panels; p += kAtOnce) {
    run_panels<V, Kernel, M, kAtOnce>(run, streams_from<kAtOnce>(run, p), rows,
                                      tile + p * kPanelWidth<V>, stride);
  }
  for (; p < run.num_panels; ++p) {
    run_panels<V, Kernel, M, 1>(run, streams_from<1>(run, p), rows, tile + p * kPanelWidth<V>,
                                stride);
  }
}

// The same for a number of rows known only at run time, 1..kFewRows.
template <class V, class Kernel>
void run_few(uint32_t num_rows, const PanelRun& run, const float* const* rows, float* tile) {
  static_assert(kFewRows == 4);
  switch (num_rows) {
    case 1:  return run_few_of<V, Kernel, 1>(run, rows, tile);
    case 2:  return run_few_of<V, Kernel, 2>(run, rows, tile);
    case 3:  return run_few_of<V, Kernel, 3>(run, rows, tile);
    default: return run_few_of<V, Kernel, 4>(run, rows, tile);
  }
}

}  // namespace dflash::compute
