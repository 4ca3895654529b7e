// One layer's experts on a GPU. The weights stay in device memory as panels (record_layout.h), and
// a forward is a few kernels per portion of rows. Its bits are those of the processor's kernels and
// of the reference, except in the bounded classes, whose bits are the card's own (numerics.h).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "cards/gpu_device.h"
#include "cards/kernel_params.h"
#include "compute/experts/content_checksum.h"
#include "compute/experts/expert_layer.h"
#include "compute/numerics.h"

namespace dflash::compute::gpu {

// Where one expert's matrices and biases lie, which is the same for all experts of a layer: offsets
// in bytes. A bias that does not exist is kNoBias, a matrix that does not exist has no panels.
struct ExpertPlaces {
  ExpertPlaces(const FfnSpec& spec, ResidentFormats formats);
  uint64_t gate = 0, up = 0, down = 0;
  uint64_t gate_bias = kNoBias, up_bias = kNoBias, down_bias = kNoBias;
  uint64_t num_bytes = 0;
};

// Whether the kernels of a class run on a device.
bool device_computes(const DeviceFacts& device, NumericsClass numerics);

class GpuLayer final : public ExpertLayer {
 public:
  // Takes the memory of all `num_local_experts` at once. Errors: kUnsupported; kOutOfMemory naming
  // device, shortfall and the largest number of experts that fits.
  static Result<std::unique_ptr<ExpertLayer>> create(std::shared_ptr<GpuDevice> device,
                                                     const FfnSpec& spec,
                                                     uint32_t num_local_experts,
                                                     ResidentFormats formats,
                                                     NumericsClass numerics = kDefaultNumerics);
  static uint64_t predicted_bytes(const FfnSpec& spec, uint32_t num_local_experts,
                                  ResidentFormats formats);
  ~GpuLayer() override;

  const FfnSpec& spec() const override { return spec_; }
  uint32_t num_local_experts() const override { return num_local_experts_; }
  uint64_t resident_bytes() const override;  // of the device's memory
  Status load_expert(uint32_t local_expert_id, const ExpertWeights& weights,
                     YieldingProgress& progress) override;
  std::optional<uint64_t> content_checksum(uint32_t local_expert_id) const override;
  // Errors beyond ExpertLayer's: kWorkerFailed and kTimeout naming the device, kOutOfMemory for
  // scratch.
  Status forward(const ForwardArgs& args, YieldingProgress& progress) override;
  int64_t device_ns() const override { return device_ns_; }

 private:
  struct Portion;
  struct Scratch;

  GpuLayer(std::shared_ptr<GpuDevice> device, const FfnSpec& spec, uint32_t num_local_experts,
           ResidentFormats formats, NumericsClass numerics, std::byte* experts);

  Status load_matrix(const char* name, const MatrixView& matrix, WeightFormat resident,
                     std::byte* device, MatrixChecksum& sum, YieldingProgress& progress);
  Status load_bias(const VectorView& bias, std::byte* device, YieldingProgress& progress);
  Portion next_portion(const ForwardArgs& args, uint32_t first_row, uint32_t first_pair) const;
  Scratch place_scratch(const Portion& portion, const ForwardArgs& args) const;
  Status forward_portion(const ForwardArgs& args, const Portion& portion,
                         YieldingProgress& progress);
  void list_pairs(const ForwardArgs& args, const Portion& portion, Scratch& scratch,
                  std::byte* host) const;
  Status queue_inputs(const ForwardArgs& args, const Portion& portion, const Scratch& scratch,
                      std::byte* device, std::byte* host, DeviceRuntime& runtime) const;
  Status queue_routing(const Portion& portion, const Scratch& scratch, std::byte* device,
                       DeviceRuntime& runtime) const;
  Status queue_rows(const ForwardArgs& args, const Portion& portion, const Scratch& scratch,
                    std::byte* device, DeviceRuntime& runtime) const;
  Status queue_projections(const Portion& portion, const Scratch& scratch, std::byte* device,
                           DeviceRuntime& runtime) const;
  Status queue_projection(const ProjectionParams& params, WeightFormat format,
                          const Scratch& scratch, std::byte* device, DeviceRuntime& runtime) const;
  CombineParams combine_params(const Portion& portion, const Scratch& scratch, std::byte* device,
                               Dtype dtype) const;
  Status range_failure(const ForwardArgs& args, const Portion& portion, const Scratch& scratch,
                       std::byte* device, uint64_t index, GpuDevice::Turn& turn,
                       YieldingProgress& progress) const;

  const std::shared_ptr<GpuDevice> device_;
  const FfnSpec spec_;
  const uint32_t num_local_experts_;
  const ResidentFormats formats_;
  const NumericsFacts& numerics_;
  const ExpertPlaces places_;
  std::byte* const experts_;  // device memory, [num_local_experts] x places_.num_bytes
  std::vector<uint8_t> is_loaded_;
  std::vector<uint64_t> checksums_;  // [num_local_experts], of those that are loaded
  int64_t device_ns_ = 0;
};

}  // namespace dflash::compute::gpu
