// An opened device of any backend as an ExpertBackend: the caller's side of the C table. Every
// error names the device.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "compute/experts/expert_backend.h"
#include "plugin/backend_abi.h"
#include "plugin/device.h"
#include "plugin/self_test.h"

namespace dflash::plugin {

class PluginBackend final : public compute::ExpertBackend {
 public:
  // `table` was checked (loader.h). Errors: kInvalidArgument for a device that does not exist;
  // kUnsupported with the reason where it cannot be used; those of the backend.
  static Result<std::unique_ptr<PluginBackend>> open(const dflash_backend_table& table,
                                                     uint32_t device, const OpenOptions& options);
  ~PluginBackend() override;

  // Errors, beside those of ExpertBackend: kOutOfMemory naming what is short and how many experts
  // of such a layer would fit.
  Result<std::unique_ptr<compute::ExpertLayer>> create_layer(
      const compute::FfnSpec& spec, uint32_t num_local_experts, compute::ResidentFormats formats,
      compute::NumericsClass numerics) override;
  // Of the device's memory.
  Result<uint64_t> predicted_bytes(const compute::FfnSpec& spec, uint32_t num_local_experts,
                                   compute::ResidentFormats formats,
                                   compute::NumericsClass numerics) const override;
  const DeviceListing& listing() const;
  Result<uint64_t> free_bytes() const;  // of the device's memory, now
  const std::string& label() const;     // "cuda:0 (NVIDIA H200)"
  bool computes(compute::NumericsClass numerics) const;
  Result<SelfTestResult> self_test(uint32_t test_case);

 private:
  PluginBackend();
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace dflash::plugin
