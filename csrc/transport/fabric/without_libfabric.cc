// Stands for the fabric in a build without libfabric's headers: the row is there, and says what it
// lacks.
// SPDX-License-Identifier: Apache-2.0
#include "transport/fabric/fabric.h"

namespace dflash::transport {
namespace {

Error missing() {
  return {ErrorCode::kUnsupported,
          "transport fabric: this build was made without libfabric's headers; install them (Debian "
          "and Ubuntu: package libfabric-dev) and build again, or take a wheel, which has it"};
}

}  // namespace

Result<std::vector<FabricProvider>> fabric_providers() { return missing(); }
uint64_t num_fabric_strangers() { return 0; }
Result<std::unique_ptr<PathOffer>> offer_fabric(const PathTerms&) { return missing(); }
Result<Acceptance> accept_fabric(const PathTerms&, Handover) { return missing(); }

}  // namespace dflash::transport
