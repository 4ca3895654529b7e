// The self-test of a device: its layers against the reference, element by element, on seeded random
// data. One case per weight format, activation and numerics class, so that a table can show what
// holds and what does not.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "plugin/device.h"

namespace dflash::plugin {

// So many pairs the case has that is about lists of pairs. A card's layer lists as many on the
// device and not on the host (cards/entry/gpu_plugin.h asserts it).
inline constexpr uint32_t kListedPairs = 600;

struct SelfTestResult {
  uint32_t num_cases = 0;  // of this device
  uint64_t elements = 0;   // compared
  // Elements whose bits differ; in a bounded class, those outside of its derived bounds.
  uint64_t differing = 0;
  std::string kernel;   // class and activation: "f32-canonical silu"
  std::string formats;  // of the weights
};

// Errors: kInvalidArgument for a case beyond the last; those of the device.
Result<SelfTestResult> run_self_test(Device& device, uint32_t test_case);

// Runs the cases of one class and format. Errors: kUnsupported where any element is wrong; those of
// the device.
Status prove_kernels(Device& device, compute::NumericsClass numerics, compute::WeightFormat format);

}  // namespace dflash::plugin
