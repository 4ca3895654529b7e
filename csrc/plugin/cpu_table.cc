// The processor as a backend behind the C table (loader.h).
// SPDX-License-Identifier: Apache-2.0
#include "plugin/loader.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "compute/cpu/cpu_backend.h"
#include "plugin/device_table.h"

namespace dflash::plugin {
namespace {

// Above wire::kMaxRows, and small enough that memory for one batch stays below a gigabyte.
constexpr uint32_t kMaxRows = 1u << 16;

uint64_t page_bytes() { return static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)); }

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(std::unique_ptr<compute::CpuBackend> backend) : backend_(std::move(backend)) {}
  compute::ExpertBackend& backend() override { return *backend_; }
  bool takes(compute::WeightFormat format) const override { return compute::has_panels(format); }
  bool computes(compute::NumericsClass numerics) const override {
    const auto classes = compute::CpuBackend::numerics_classes(backend_->isa());
    return std::find(classes.begin(), classes.end(), numerics) != classes.end();
  }
  uint32_t max_rows() const override { return kMaxRows; }
  Result<uint64_t> free_bytes() override {
    return page_bytes() * static_cast<uint64_t>(::sysconf(_SC_AVPHYS_PAGES));
  }
  uint64_t layer_bytes(const compute::FfnSpec& spec, uint32_t num_local_experts,
                       compute::ResidentFormats formats) const override {
    return compute::CpuBackend::predicted_bytes(backend_->isa(), spec, num_local_experts, formats);
  }

 private:
  std::unique_ptr<compute::CpuBackend> backend_;
};

struct CpuDriver {
  static constexpr const char* kName = "cpu";

  static Result<std::vector<DeviceListing>> list() {
    return std::vector<DeviceListing>{
        {"the processor", "cpu", compute::isa_name(compute::best_isa()),
         page_bytes() * static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)), ""}
    };
  }

  static Result<std::unique_ptr<Device>> open(uint32_t device, const OpenOptions& options) {
    if (device != 0)
      return Error{ErrorCode::kInvalidArgument,
                   "device cpu:" + std::to_string(device) + " does not exist; there is cpu:0"};
    auto backend = compute::CpuBackend::create(compute::best_isa(), options.num_threads);
    if (!backend.ok()) return std::move(backend).error();
    return std::unique_ptr<Device>(std::make_unique<CpuDevice>(std::move(backend).value()));
  }
};

}  // namespace

const dflash_backend_table* cpu_table() { return table_of<CpuDriver>(); }

}  // namespace dflash::plugin
