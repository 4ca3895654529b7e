// CUDA's driver API, opened at run time: libcuda.so.1 comes with the card's driver, nothing of the
// toolkit is needed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "cards/module/driver_api.h"

namespace dflash::compute::gpu {

// The kernels of a build.
struct CudaImage {
  const void* fatbin;
  int toolkit_major;  // the version of the toolkit that made it
  int least_arch;     // the smallest architecture in it (75 is sm_75)
  // what cards of compute capability 9.0 run is sm_90a, whose kernels multiply by warpgroups
  bool has_sm90a;
};

// Errors: kUnsupported where the library is missing, older than this build, or refuses to start.
Result<std::unique_ptr<DriverApi>> open_cuda_driver(const CudaImage& image,
                                                    const std::string& library = "libcuda.so.1");

}  // namespace dflash::compute::gpu
