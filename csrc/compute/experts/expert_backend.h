// What a worker needs of whoever computes: layers to fill with experts. The CPU backend is one;
// plug-ins come as another (plugin/).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "compute/experts/expert_layer.h"
#include "compute/numerics.h"

namespace dflash::compute {

class ExpertBackend {
 public:
  virtual ~ExpertBackend() = default;
  // A layer without experts, which keeps `formats` when resident; it must not outlive the backend.
  // Errors: kUnsupported where the backend does not compute the class, or the class does not take
  // the formats; kOutOfMemory.
  virtual Result<std::unique_ptr<ExpertLayer>> create_layer(const FfnSpec& spec,
                                                            uint32_t num_local_experts,
                                                            ResidentFormats formats,
                                                            NumericsClass numerics) = 0;
  // Bytes that such a layer will hold once all its experts are loaded, before any memory is taken.
  virtual Result<uint64_t> predicted_bytes(const FfnSpec& spec, uint32_t num_local_experts,
                                           ResidentFormats formats,
                                           NumericsClass numerics) const = 0;
};

}  // namespace dflash::compute
