// Random numbers of a simulation: the same on every machine and compiler, which the distributions
// of the standard library are not. The generator is SplitMix64 (Steele, Lea and Flood, "Fast
// splittable pseudorandom number generators", 2014).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <iterator>

namespace dflash::simulation {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  // In [0, bound), for bounds far below 2^64, so that the bias of the remainder does not matter.
  uint64_t below(uint64_t bound) { return bound == 0 ? 0 : next() % bound; }
  // In [least, most].
  int64_t between(int64_t least, int64_t most) {
    return least + static_cast<int64_t>(below(static_cast<uint64_t>(most - least) + 1));
  }
  // In [0, 1).
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  bool chance(double probability) { return unit() < probability; }
  // In [least, most], each order of magnitude as likely as the next: most durations are short.
  int64_t magnitude(int64_t least, int64_t most) {
    const double ratio = static_cast<double>(most) / static_cast<double>(least);
    return static_cast<int64_t>(static_cast<double>(least) * std::exp(std::log(ratio) * unit()));
  }
  template <class Choices>
  const auto& one_of(const Choices& choices) {
    return choices[below(std::size(choices))];
  }
  // An independent generator, so that what one part draws does not shift what another draws.
  Random split() { return Random(next()); }

 private:
  uint64_t state_;
};

}  // namespace dflash::simulation
