// The bounds of an FfnSpec, on which every backend can rely.
// SPDX-License-Identifier: Apache-2.0
#include "compute/experts/ffn_spec.h"

#include <cmath>
#include <string>

namespace dflash::compute {
namespace {

// The largest width of a row or of the intermediate layer: four times that of the widest published
// model, and far from an overflow of 64 bits in any product of sizes.
constexpr uint32_t kMaxWidth = 1u << 18;

Error unsupported(const char* field, const std::string& found, const std::string& bound) {
  return Error{ErrorCode::kUnsupported,
               std::string("FfnSpec.") + field + " is " + found + "; supported: " + bound};
}

Status check_width(const char* field, uint32_t width) {
  if (width >= 1 && width <= kMaxWidth) return ok();
  return unsupported(field, std::to_string(width), "1.." + std::to_string(kMaxWidth));
}

}  // namespace

Status FfnSpec::validate() const {
  DFLASH_TRY(check_width("in_size", in_size));
  DFLASH_TRY(check_width("intermediate_size", intermediate_size));
  DFLASH_TRY(check_width("out_size", out_size));
  if (activation > Activation::kQuickGelu)
    return unsupported("activation", std::to_string(static_cast<int>(activation)), "0..7");
  if (gate > GateKind::kClampedSwiglu)
    return unsupported("gate", std::to_string(static_cast<int>(gate)), "0..2");
  if (!std::isfinite(alpha)) return unsupported("alpha", std::to_string(alpha), "finite values");
  if (!std::isfinite(up_offset))
    return unsupported("up_offset", std::to_string(up_offset), "finite values");
  if (std::isnan(gate_max)) return unsupported("gate_max", "nan", "numbers and infinity");
  if (!(up_limit >= 0.0f))
    return unsupported("up_limit", std::to_string(up_limit), "0 to infinity");
  if (gate == GateKind::kNone && !(std::isinf(gate_max) && gate_max > 0 && std::isinf(up_limit))) {
    return unsupported("gate", "none with limits", "limits of infinity where there is no gate");
  }
  return ok();
}

}  // namespace dflash::compute
