// The arithmetic of paged attention, which every kernel and the reference perform bit by bit. A
// query row's bits depend on the row, on its own sequence's keys and values as they are stored, and
// on nothing else: not on other rows, threads, instruction sets, block numbers or how a prompt was
// cut. Nothing here may depend on std::, because files compiled for newer instruction sets
// instantiate it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "compute/experts/activation.h"

namespace dflash::compute {

// A query at position p sees the keys at max(0, p - window + 1)..p, where window 0 means all. A key
// that is not visible is absent below: whatever its bits are, they reach no sum.
//
//   product(q, k)  over blocks of 256 elements: one chain of fma(q[i], k[i], sum) per block from +0
//                  with ascending i; block sums added in ascending order. q and k are widened
//                  exactly.
//   s(q, k)        product * scale; with a soft cap, cap * tanh(that / cap)
//
// Keys are cut into tiles of 256, counted from the sequence's position 0. Each tile with a visible
// key gives, with j counting its keys:
//
//   m_t            the largest s
//   p_j            exp(s_j - m_t)
//   l_t            16 partial sums from +0, to which partial j % 16 adds p_j with ascending j; then
//                  the partial sums added in the order 0..15
//   o_t[d]         one chain of fma(p_j, v_j[d], sum) from +0 with ascending j
//
// The first tile is taken as it is; the others follow in ascending order:
//
//   m' = max(m, m_t)   a = exp(m - m')   b = exp(m_t - m')
//   l' = fma(l_t, b, l * a)   o'[d] = fma(o_t[d], b, o[d] * a)
//
// A sink is one more score without a value: it is merged last, as a tile with m_t = sink, l_t = 1
// and o_t = +0. The output is o / l, rounded once to its dtype; every NaN is 0x7fc00000 before. A
// visible product that is not finite makes its row NaN, but for one of minus infinity beside a
// finite one of the same tile, which counts as absent.

// Keys of one tile. It is 16 blocks, whose keys and values fit a second-level cache.
inline constexpr uint32_t kTileTokens = 256;
// Partial sums of l_t.
inline constexpr uint32_t kTilePartials = 16;
// Elements of one chain of a product; the K block of f32-canonical.
inline constexpr uint32_t kProductChain = 256;

// What is the same for all rows of one call.
struct AttentionForm {
  float scale = 1.0f;
  uint32_t window = 0;           // keys that a query sees, its own among them; 0 for all
  float softcap = 0.0f;          // 0 for none
  const float* sinks = nullptr;  // [num_heads]; null for none
};

// The first key that a query at `position` sees.
constexpr uint32_t first_visible(uint32_t position, uint32_t window) {
  return window == 0 || position < window ? 0 : position - window + 1;
}

// tanh(x) within 2 ulp: below 0.625 the polynomial of Cephes tanhf, above it 1 - 2 / (e^2|x| + 1)
// with the sign of x. NaN stays NaN.
template <class V>
inline typename V::F tanh(typename V::F x) {
  using F = typename V::F;
  const F zero = V::set1(0.0f), one = V::set1(1.0f);
  const F magnitude = V::max(x, V::sub(zero, x));
  const F square = V::mul(x, x);
  F near = V::set1(-5.70498872745e-3f);
  near = V::fma(near, square, V::set1(2.06390887954e-2f));
  near = V::fma(near, square, V::set1(-5.37397155531e-2f));
  near = V::fma(near, square, V::set1(1.33314422036e-1f));
  near = V::fma(near, square, V::set1(-3.33332819422e-1f));
  near = V::fma(V::mul(near, square), x, x);
  const F grown = exp<V>(V::add(magnitude, magnitude));
  F far = V::sub(one, V::div(V::set1(2.0f), V::add(grown, one)));
  far = V::select_greater(zero, x, V::sub(zero, far), far);
  return V::select_greater(magnitude, V::set1(0.625f), far, near);
}

// s of a product.
template <class V>
inline typename V::F attention_score(typename V::F product, const AttentionForm& form) {
  const typename V::F scaled = V::mul(product, V::set1(form.scale));
  if (form.softcap == 0.0f) return scaled;
  const typename V::F cap = V::set1(form.softcap);
  return V::mul(cap, tanh<V>(V::div(scaled, cap)));
}

}  // namespace dflash::compute
