// Backends that do what a test wants: devices that are too old, too small, wrong or lost, and one
// without a driver.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "compute/reference/reference.h"
#include "plugin/device.h"

namespace dflash::plugin::toys {

inline constexpr uint32_t kSmallMemory = 0, kTooOld = 1, kWrongBits = 2, kUntriedWrong = 3,
                          kUntriedRight = 4, kUntriedUneven = 5;

// The reference, unless told otherwise: replies with every bit turned over, or the lowest one of
// large batches, or a card that is lost in each call.
class ScriptedLayer final : public compute::ExpertLayer {
 public:
  ScriptedLayer(std::unique_ptr<compute::ExpertLayer> inner, uint32_t device)
      : inner_(std::move(inner)), device_(device) {}
  const compute::FfnSpec& spec() const override { return inner_->spec(); }
  uint32_t num_local_experts() const override { return inner_->num_local_experts(); }
  uint64_t resident_bytes() const override { return inner_->resident_bytes(); }
  Status load_expert(uint32_t id, const compute::ExpertWeights& weights,
                     compute::YieldingProgress& progress) override {
    return inner_->load_expert(id, weights, progress);
  }
  std::optional<uint64_t> content_checksum(uint32_t id) const override {
    return inner_->content_checksum(id);
  }
  Status forward(const compute::ForwardArgs& args, compute::YieldingProgress& progress) override {
    if (device_ == kSmallMemory)
      return Error{ErrorCode::kWorkerFailed, "the card has fallen off the bus"};
    DFLASH_TRY(inner_->forward(args, progress));
    if (device_ == kUntriedRight) return ok();
    if (device_ == kUntriedUneven) {
      if (args.num_rows > 16) args.reply[0] ^= std::byte{1};
      return ok();
    }
    const size_t bytes = size_t{args.num_rows} * spec().out_size * dtype_bytes(args.reply_dtype);
    for (size_t at = 0; at < bytes; ++at) args.reply[at] = ~args.reply[at];
    return ok();
  }

 private:
  std::unique_ptr<compute::ExpertLayer> inner_;
  uint32_t device_;
};

class ScriptedDevice final : public Device, public compute::ExpertBackend {
 public:
  explicit ScriptedDevice(uint32_t device) : device_(device) {}
  compute::ExpertBackend& backend() override { return *this; }
  bool takes(compute::WeightFormat format) const override { return compute::is_float(format); }
  bool computes(compute::NumericsClass numerics) const override {
    return numerics == compute::NumericsClass::kF32Canonical ||
           numerics == compute::NumericsClass::kBf16Mma;
  }
  bool must_prove() const override { return device_ >= kUntriedWrong; }
  uint32_t max_rows() const override { return 64; }
  Result<uint64_t> free_bytes() override {
    return device_ == kSmallMemory ? uint64_t{4500} : uint64_t{1} << 30;
  }
  uint64_t layer_bytes(const compute::FfnSpec&, uint32_t num_local_experts,
                       compute::ResidentFormats) const override {
    return uint64_t{1000} * num_local_experts;
  }
  Result<uint64_t> predicted_bytes(const compute::FfnSpec& spec, uint32_t num_local_experts,
                                   compute::ResidentFormats formats,
                                   compute::NumericsClass) const override {
    return layer_bytes(spec, num_local_experts, formats);
  }
  Result<std::unique_ptr<compute::ExpertLayer>> create_layer(
      const compute::FfnSpec& spec, uint32_t num_local_experts, compute::ResidentFormats formats,
      compute::NumericsClass numerics) override {
    auto inner = compute::make_reference_layer(spec, num_local_experts, formats, numerics);
    return std::unique_ptr<compute::ExpertLayer>(
        std::make_unique<ScriptedLayer>(std::move(inner), device_));
  }

 private:
  uint32_t device_;
};

struct ScriptedDriver {
  static constexpr const char* kName = "scripted";
  static Result<std::vector<DeviceListing>> list() {
    return std::vector<DeviceListing>{
        {"small card",   "cuda", "sm_75", 8000,     ""                                   },
        {"old card",     "cuda", "sm_52", 8000,     "compute capability 5.2 is below 7.5"},
        {"wrong card",   "cuda", "sm_75", 1u << 30, ""                                   },
        {"untried card", "cuda", "sm_75", 1u << 30, ""                                   },
        {"untried card", "cuda", "sm_75", 1u << 30, ""                                   },
        {"untried card", "cuda", "sm_90", 1u << 30, ""                                   }
    };
  }
  static Result<std::unique_ptr<Device>> open(uint32_t device, const OpenOptions&) {
    return std::unique_ptr<Device>(std::make_unique<ScriptedDevice>(device));
  }
};

struct DriverlessDriver {
  static constexpr const char* kName = "driverless";
  static Result<std::vector<DeviceListing>> list() {
    return Error{ErrorCode::kUnsupported, "the driver library is missing"};
  }
  static Result<std::unique_ptr<Device>> open(uint32_t, const OpenOptions&) {
    return Error{ErrorCode::kUnsupported, "the driver library is missing"};
  }
};

}  // namespace dflash::plugin::toys
