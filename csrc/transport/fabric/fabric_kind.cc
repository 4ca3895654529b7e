// The handshake of fabrics: the host opens an endpoint of each provider, the worker takes the first
// that it has too, and both tell each other their addresses.
// SPDX-License-Identifier: Apache-2.0
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <utility>

#include "transport/fabric/endpoint.h"
#include "transport/fabric/fabric.h"
#include "transport/fabric/fabric_channel.h"
#include "transport/fabric/fabric_handover.h"
#include "transport/ring/layout.h"

namespace dflash::transport {
namespace {

template <class Listed>
std::string names_of(const Listed& providers) {
  std::string names;
  for (const FabricProvider& one : providers) {
    names += (names.empty() ? "" : ", ") + one.name + " (protocol " + std::to_string(one.protocol) +
             ", version " + std::to_string(one.protocol_version) + ")";
  }
  return names;
}

bool can_talk(const FabricProvider& one, const FabricProvider& other) {
  return one.name == other.name && one.protocol == other.protocol &&
         one.protocol_version == other.protocol_version;
}

Result<FabricEndpoint> open_endpoint(const FabricProvider& provider, const std::string& local_host,
                                     const SlotGeometry& geometry) {
  return FabricEndpoint::open(provider, local_host, max_fabric_message(geometry),
                              num_fabric_sends(geometry), num_fabric_receives(geometry));
}

// The numeric address by which the peer of a connection reaches this end.
std::string local_host_of(int socket) {
  sockaddr_storage address{};
  socklen_t address_bytes = sizeof address;
  char text[INET6_ADDRSTRLEN] = "";
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &address_bytes) != 0) return {};
  if (address.ss_family == AF_INET) {
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(address).sin_addr, text,
                sizeof text);
  } else if (address.ss_family == AF_INET6) {
    const in6_addr& found = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
    // A socket for both families calls an address of the older one by a longer name.
    if (IN6_IS_ADDR_V4MAPPED(&found)) {
      ::inet_ntop(AF_INET, &found.s6_addr[12], text, sizeof text);
    } else {
      ::inet_ntop(AF_INET6, &found, text, sizeof text);
    }
  }
  return text;
}

// Takes the connection out of a handover, which beside it brings bytes alone.
Result<StreamSocket> companion_of(Handover& handover, const char* what) {
  DFLASH_TRY(check_handover(kFabricKind, what, handover, 1, handover.bytes.size()));
  if (handover.secured != nullptr) return StreamSocket(std::move(handover.secured));
  return StreamSocket(std::move(handover.descriptors[0]));
}

std::vector<std::byte> bytes_of(const std::vector<FabricEndpoint>& endpoints) {
  std::vector<FabricOffered> offers;
  for (const FabricEndpoint& one : endpoints) {
    offers.push_back({
        one.provider(), {one.address().begin(), one.address().end()}
    });
  }
  return encode_fabric_offer(offers);
}

class FabricOffer final : public PathOffer {
 public:
  FabricOffer(const PathTerms& terms, std::vector<FabricEndpoint> endpoints)
      : terms_(terms), endpoints_(std::move(endpoints)), bytes_(bytes_of(endpoints_)) {}

  std::span<const std::byte> bytes() const override { return bytes_; }
  std::vector<int> descriptors() const override { return {}; }
  Result<std::unique_ptr<Channel>> complete(Handover answer) override {
    auto companion = companion_of(answer, "answer");
    if (!companion.ok()) return std::move(companion).error();
    const auto taken = decode_fabric_answer(answer.bytes);
    if (!taken.ok()) return taken.error();
    if (taken.value().which >= endpoints_.size()) {
      return Error{ErrorCode::kProtocol, "transport fabric: its answer takes what was not offered"};
    }
    FabricEndpoint endpoint = std::move(endpoints_[taken.value().which]);
    endpoints_.clear();
    DFLASH_TRY(endpoint.meet(taken.value().address));
    return make_fabric_channel(Side::kHost, terms_.geometry, std::move(endpoint),
                               std::move(companion).value());
  }

 private:
  const PathTerms terms_;
  std::vector<FabricEndpoint> endpoints_;
  const std::vector<std::byte> bytes_;
};

}  // namespace

Result<std::unique_ptr<PathOffer>> offer_fabric(const PathTerms& terms) {
  DFLASH_TRY(check_geometry(terms.geometry));
  auto providers = fabric_providers();
  if (!providers.ok()) return std::move(providers).error();
  std::vector<FabricEndpoint> endpoints;
  std::string reasons;
  for (const FabricProvider& one : providers.value()) {
    if (endpoints.size() == kMaxFabricOffers || one.name.size() > kMaxFabricNameBytes) continue;
    if (terms.is_fast_only && !one.is_fast) continue;
    auto opened = open_endpoint(one, terms.local_host, terms.geometry);
    if (opened.ok()) {
      endpoints.push_back(std::move(opened).value());
    } else {
      reasons += "; " + opened.error().message;
    }
  }
  if (endpoints.empty()) {
    return Error{
        ErrorCode::kUnsupported,
        "transport fabric: none of " + names_of(providers.value()) + " can be used" +
            (terms.is_fast_only && reasons.empty() ? ": none is of fast hardware" : reasons)};
  }
  return std::unique_ptr<PathOffer>(std::make_unique<FabricOffer>(terms, std::move(endpoints)));
}

Result<Acceptance> accept_fabric(const PathTerms& terms, Handover offered) {
  auto companion = companion_of(offered, "offer");
  if (!companion.ok()) return std::move(companion).error();
  auto offers = decode_fabric_offer(offered.bytes);
  if (!offers.ok()) return std::move(offers).error();
  auto providers = fabric_providers();
  if (!providers.ok()) return std::move(providers).error();
  const auto& own = providers.value();
  const std::string local_host = local_host_of(companion.value().fd());
  std::string reasons;
  for (size_t which = 0; which < offers.value().size(); ++which) {
    const FabricOffered& one = offers.value()[which];
    const auto shared = std::find_if(own.begin(), own.end(), [&](const FabricProvider& mine) {
      return can_talk(mine, one.provider);
    });
    if (shared == own.end()) continue;
    auto endpoint = open_endpoint(*shared, local_host, terms.geometry);
    if (!endpoint.ok()) {
      reasons += "; " + endpoint.error().message;
      continue;
    }
    DFLASH_TRY(endpoint.value().meet(one.address));
    FabricAnswered answer{static_cast<uint8_t>(which), {}};
    answer.address.assign(endpoint.value().address().begin(), endpoint.value().address().end());
    auto channel = make_fabric_channel(Side::kWorker, terms.geometry, std::move(endpoint).value(),
                                       std::move(companion).value());
    if (!channel.ok()) return std::move(channel).error();
    Acceptance accepted{std::move(channel).value(), {}};
    accepted.answer.bytes = encode_fabric_answer(answer);
    return accepted;
  }
  std::vector<FabricProvider> theirs;
  for (const FabricOffered& one : offers.value()) theirs.push_back(one.provider);
  return Error{ErrorCode::kUnsupported, "transport fabric: the host offers " + names_of(theirs) +
                                            ", the worker has " + names_of(own) +
                                            ": no provider of both can be used" + reasons};
}

}  // namespace dflash::transport
