// The activation and gate formulas of numerics class f32-canonical. They are one template over a
// small vector type, so that scalar, AVX2, AVX-512 and NEON code and the reference perform the same
// IEEE operations per element in the same order. Nothing here may depend on std::, because files
// compiled for newer instruction sets instantiate it.
//
// A vector type V offers:
//   F, I                         vectors of float32 and of int32
//   set1, add, sub, mul, div     as their names say
//   fma(a, b, c)                 a * b + c, rounded once
//   min(a, b), max(a, b)         a < b ? a : b and a > b ? a : b, so that b comes of an unordered
//                                comparison
//   select_greater(a, b, x, y)   a > b ? x : y
//   bits(F), set1i, subi         bit patterns and integers
//   halve(I)                     arithmetic shift right by one
//   power_of_two(n)              2^n for n in [-126, 127]
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/experts/ffn_spec.h"

#if defined(__CUDACC__) || defined(__HIP__)
#define DFLASH_DEVICE __device__  // the GPU kernels' vector type has device functions only
#else
#define DFLASH_DEVICE
#endif

namespace dflash::compute {

// e^x within 1 ulp of the correctly rounded value. NaN stays NaN, overflow gives infinity, and
// underflow goes through subnormals. x is reduced to n ln2 + r with |r| <= ln2/2 and ln2 in two
// parts (Cody and Waite); the polynomial is that of Cephes expf.
template <class V>
DFLASH_DEVICE inline typename V::F exp(typename V::F x) {
  using F = typename V::F;
  // Beyond these bounds nothing changes: e^-104 rounds to zero and e^89 to infinity.
  x = V::max(V::set1(-104.0f), V::min(V::set1(89.0f), x));
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
  const F magic = V::set1(12582912.0f);
  const F shifted = V::fma(x, V::set1(1.44269504f), magic);
  const F n = V::sub(shifted, magic);
  F r = V::fma(n, V::set1(-0.693359375f), x);
  r = V::fma(n, V::set1(2.12194440e-4f), r);
  F p = V::set1(1.9875691500e-4f);
  p = V::fma(p, r, V::set1(1.3981999507e-3f));
  p = V::fma(p, r, V::set1(8.3334519073e-3f));
  p = V::fma(p, r, V::set1(4.1665795894e-2f));
  p = V::fma(p, r, V::set1(1.6666665459e-1f));
  p = V::fma(p, r, V::set1(5.0000001201e-1f));
  p = V::add(V::fma(p, V::mul(r, r), r), V::set1(1.0f));
  // 2^n is multiplied in two factors, because n reaches -150 and 128; only the second one rounds.
  const typename V::I exponent = V::subi(V::bits(shifted), V::set1i(0x4b400000));
  const typename V::I first = V::halve(exponent);
  return V::mul(V::mul(p, V::power_of_two(first)), V::power_of_two(V::subi(exponent, first)));
}

// x / (1 + e^(-scaled)), where the caller has multiplied x by the slope to get `scaled`.
template <class V>
DFLASH_DEVICE inline typename V::F over_one_plus_exp_of_minus(typename V::F x,
                                                              typename V::F scaled) {
  return V::div(x, V::add(V::set1(1.0f), exp<V>(V::sub(V::set1(0.0f), scaled))));
}

template <class V>
DFLASH_DEVICE inline typename V::F sigmoid(typename V::F x) {
  return over_one_plus_exp_of_minus<V>(V::set1(1.0f), x);
}

// 1 + erf(x). Left of -0.93 it is computed as erfc(-x) = e^poly, so that nothing cancels: the
// absolute error is below 2^-29 left of -3. Minimax coefficients: N. Juffa, "Efficient faithfully
// rounded implementation of error function erff()".
template <class V>
DFLASH_DEVICE inline typename V::F one_plus_erf(typename V::F x) {
  using F = typename V::F;
  const F zero = V::set1(0.0f);
  const F t = V::max(x, V::sub(zero, x));
  const F s = V::mul(x, x);
  F far = V::fma(V::set1(-1.72853470e-5f), t, V::set1(3.83197126e-4f));
  far = V::fma(far, s, V::fma(V::set1(-3.88396438e-3f), t, V::set1(2.42546219e-2f)));
  far = V::fma(far, t, V::set1(-1.06777877e-1f));
  far = V::fma(far, t, V::set1(-6.34846687e-1f));
  far = V::fma(far, t, V::set1(-1.28717512e-1f));
  far = exp<V>(V::fma(far, t, V::sub(zero, t)));
  far = V::select_greater(zero, x, far, V::sub(V::set1(2.0f), far));
  F near = V::set1(-5.96761703e-4f);
  near = V::fma(near, s, V::set1(4.99119423e-3f));
  near = V::fma(near, s, V::set1(-2.67681349e-2f));
  near = V::fma(near, s, V::set1(1.12819925e-1f));
  near = V::fma(near, s, V::set1(-3.76125336e-1f));
  near = V::fma(near, s, V::set1(1.28379166e-1f));
  near = V::add(V::set1(1.0f), V::fma(near, x, x));
  return V::select_greater(t, V::set1(0.927734375f), far, near);
}

// 0.5 x (1 + tanh z) with z = sqrt(2/pi) (x + 0.044715 x^3), computed as x / (1 + e^(-2z)), which
// does not cancel where tanh nears -1.
template <class V>
DFLASH_DEVICE inline typename V::F gelu_tanh(typename V::F x) {
  const typename V::F cubic = V::mul(V::mul(x, x), x);
  const typename V::F z = V::mul(V::set1(0.79788456f), V::fma(V::set1(0.044715f), cubic, x));
  return over_one_plus_exp_of_minus<V>(x, V::add(z, z));
}

template <class V>
DFLASH_DEVICE inline typename V::F activate(Activation activation, typename V::F x) {
  switch (activation) {
    case Activation::kSilu: return over_one_plus_exp_of_minus<V>(x, x);
    case Activation::kGelu:
      return V::mul(V::mul(V::set1(0.5f), x), one_plus_erf<V>(V::mul(x, V::set1(0.70710678f))));
    case Activation::kGeluTanh:    return gelu_tanh<V>(x);
    case Activation::kRelu:        return V::max(V::set1(0.0f), x);
    case Activation::kReluSquared: {
      const typename V::F positive = V::max(V::set1(0.0f), x);
      return V::mul(positive, positive);
    }
    case Activation::kIdentity:  return x;
    case Activation::kSigmoid:   return sigmoid<V>(x);
    case Activation::kQuickGelu: return V::mul(x, sigmoid<V>(V::mul(V::set1(1.702f), x)));
  }
  return x;
}

// The intermediate value of a gate g and an up u, to which biases have been added. With kNone, g is
// ignored.
template <class V>
DFLASH_DEVICE inline typename V::F gate(const FfnSpec& spec, typename V::F g, typename V::F u) {
  if (spec.gate == GateKind::kNone) return activate<V>(spec.activation, u);
  g = V::min(V::set1(spec.gate_max), g);
  u = V::max(V::set1(-spec.up_limit), V::min(V::set1(spec.up_limit), u));
  if (spec.gate == GateKind::kGated) return V::mul(activate<V>(spec.activation, g), u);
  return V::mul(V::add(u, V::set1(spec.up_offset)),
                V::mul(g, sigmoid<V>(V::mul(V::set1(spec.alpha), g))));
}

}  // namespace dflash::compute
