// The table of kinds, and what can be done with any row of it.
// SPDX-License-Identifier: Apache-2.0
#include "transport/kinds.h"

#include <string>

#include "transport/fabric/fabric.h"
#include "transport/shared/shared_kind.h"
#include "transport/stream/stream.h"

namespace dflash::transport {
namespace {

constexpr TransportKind kKinds[] = {kSharedKind, kUnixKind, kTcpKind, kFabricKind};

}  // namespace

std::span<const TransportKind> transport_kinds() { return kKinds; }

Result<const TransportKind*> find_kind(std::span<const TransportKind> kinds,
                                       std::string_view name) {
  std::string known;
  for (const TransportKind& kind : kinds) {
    if (name == kind.name) return &kind;
    known += (known.empty() ? "" : ", ") + std::string(kind.name);
  }
  return Error{ErrorCode::kUnsupported,
               "transport '" + std::string(name) + "' is not one of " + known};
}

const char* reach_name(Reach reach) {
  switch (reach) {
    case Reach::kStarted:     return "started";
    case Reach::kStartedUnix: return "started, unix";
    case Reach::kStartedTcp:  return "started, tcp";
    case Reach::kUnixPath:    return "unix path";
    case Reach::kTcpHost:     return "tcp host";
  }
  check(false, "a Reach without a name");
  return "";
}

}  // namespace dflash::transport
