// What a worker needs of whoever computes: layers that it can fill with experts. The CPU backend is
// one implementation; plug-ins bring others (plugin/).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "compute/experts/expert_layer.h"
#include "compute/numerics.h"

namespace dflash::compute {

// Any thread may ask for a layer, because ShardStore does so without its lock. Each layer then has
// rules of its own (ExpertLayer).
class ExpertBackend {
 public:
  virtual ~ExpertBackend() = default;
  // Makes a layer without experts, which will keep them in `formats` and must not outlive the
  // backend. Errors: kUnsupported where the backend does not compute the class or the class does
  // not take the formats; kOutOfMemory.
  virtual Result<std::unique_ptr<ExpertLayer>> create_layer(const FfnSpec& spec,
                                                            uint32_t num_local_experts,
                                                            ResidentFormats formats,
                                                            NumericsClass numerics) = 0;
  // Bytes that such a layer will hold once all its experts are loaded. Takes no memory itself.
  virtual Result<uint64_t> predicted_bytes(const FfnSpec& spec, uint32_t num_local_experts,
                                           ResidentFormats formats,
                                           NumericsClass numerics) const = 0;
};

}  // namespace dflash::compute
