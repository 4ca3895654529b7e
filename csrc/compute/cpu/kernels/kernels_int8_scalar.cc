// The kernels that compute one lane at a time, for every processor, on int8 codes.
// SPDX-License-Identifier: Apache-2.0
#include "compute/vector_scalar.h"

#include "compute/cpu/kernels/int8_products.h"

namespace dflash::compute {
namespace {

struct ScalarDot {
  using I = int32_t;
  static constexpr int32_t kSignedOffset = 0;
  static constexpr uint32_t kTileRows = 2;
  static I both(I a, I b) { return a & b; }
  static I either(I a, I b) { return a | b; }
  static I as_signed_codes(I bytes) { return bytes; }

  template <bool kIsSigned>
  static I dot(I codes, I inputs, I sum) {
    for (int byte = 0; byte < 4; ++byte) {
      sum += static_cast<int8_t>(codes >> (8 * byte)) * static_cast<int8_t>(inputs >> (8 * byte));
    }
    return sum;
  }

  using ByteTable = const int8_t*;
  static ByteTable byte_table(const int8_t* values) { return values; }
  static I look_up_bytes(ByteTable table, I indices) {
    uint32_t found = 0;
    for (int byte = 0; byte < 4; ++byte)
      found |= uint32_t{static_cast<uint8_t>(table[indices >> (8 * byte) & 15])} << (8 * byte);
    return static_cast<I>(found);
  }
  static I fifth_bits(I bits, uint32_t w, uint32_t p) {
    I found = 0;
    for (uint32_t byte = 0; byte < 4; ++byte)
      found |= (bits >> (8 * w + 2 * byte + p) & 1) << (8 * byte + 4);
    return found;
  }
};

}  // namespace

constinit const KernelSet kScalarInt8 = make_int8_set<ScalarVector, ScalarDot>();

}  // namespace dflash::compute
