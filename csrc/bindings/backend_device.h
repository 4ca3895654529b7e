// An opened device as Python holds it, shared with the worker that computes on it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>

#include "bindings/arguments.h"
#include "plugin/plugin_backend.h"

namespace dflash::bindings {

// While a worker serves with the backend, only that worker may use it.
struct BackendDevice {
  std::shared_ptr<plugin::PluginBackend> backend;
};

// The worker's share of a device's backend.
class SharedBackend final : public compute::ExpertBackend {
 public:
  explicit SharedBackend(std::shared_ptr<plugin::PluginBackend> shared)
      : shared_(std::move(shared)) {}
  Result<std::unique_ptr<compute::ExpertLayer>> create_layer(
      const compute::FfnSpec& spec, uint32_t num_local_experts, compute::ResidentFormats formats,
      compute::NumericsClass numerics) override {
    return shared_->create_layer(spec, num_local_experts, formats, numerics);
  }

  Result<uint64_t> predicted_bytes(const compute::FfnSpec& spec, uint32_t num_local_experts,
                                   compute::ResidentFormats formats,
                                   compute::NumericsClass numerics) const override {
    return shared_->predicted_bytes(spec, num_local_experts, formats, numerics);
  }

 private:
  std::shared_ptr<plugin::PluginBackend> shared_;
};

}  // namespace dflash::bindings
