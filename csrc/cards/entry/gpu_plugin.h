// What the GPU plug-ins share: a device runtime and the GPU layer as a Device of the C table. Each
// plug-in is one shared object that exports one function and holds its own copy of everything else.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "cards/entry/export.h"
#include "cards/gpu_layer.h"
#include "cards/host_routing.h"
#include "cards/record_layout.h"
#include "plugin/device.h"
#include "plugin/self_test.h"

namespace dflash::plugin {

static_assert(kListedPairs > compute::gpu::kMostHostPairs);

class GpuPluginDevice final : public Device, public compute::ExpertBackend {
 public:
  GpuPluginDevice(std::unique_ptr<compute::gpu::DeviceRuntime> runtime, bool must_prove)
      : must_prove_(must_prove),
        device_(std::make_shared<compute::gpu::GpuDevice>(std::move(runtime))) {}

  compute::ExpertBackend& backend() override { return *this; }
  bool takes(compute::WeightFormat format) const override {
    return compute::gpu::is_card_format(format);
  }
  bool computes(compute::NumericsClass numerics) const override {
    return compute::gpu::device_computes(device_->facts(), numerics);
  }
  bool must_prove() const override { return must_prove_; }
  uint32_t max_rows() const override { return kMaxRows; }
  Result<uint64_t> free_bytes() override { return device_->free_bytes(); }
  uint64_t layer_bytes(const compute::FfnSpec& spec, uint32_t num_local_experts,
                       compute::ResidentFormats formats) const override {
    return compute::gpu::GpuLayer::predicted_bytes(spec, num_local_experts, formats);
  }
  Result<uint64_t> predicted_bytes(const compute::FfnSpec& spec, uint32_t num_local_experts,
                                   compute::ResidentFormats formats,
                                   compute::NumericsClass) const override {
    return layer_bytes(spec, num_local_experts, formats);
  }
  Result<std::unique_ptr<compute::ExpertLayer>> create_layer(
      const compute::FfnSpec& spec, uint32_t num_local_experts, compute::ResidentFormats formats,
      compute::NumericsClass numerics) override {
    return compute::gpu::GpuLayer::create(device_, spec, num_local_experts, formats, numerics);
  }

 private:
  static constexpr uint32_t kMaxRows = 1u << 16;  // the layer cuts batches to its scratch memory
  const bool must_prove_;
  std::shared_ptr<compute::gpu::GpuDevice> device_;
};

}  // namespace dflash::plugin
