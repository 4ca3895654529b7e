// Finds providers, and opens endpoints of them.
// SPDX-License-Identifier: Apache-2.0
#include "transport/fabric/endpoint.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/kept_signal_handlers.h"
#include "transport/fabric/fabric_handover.h"

namespace dflash::transport {
namespace {

// The first version of the interface with everything that is used here.
constexpr uint32_t kVersion = FI_VERSION(1, 11);

// Those behind which hardware moves the bytes, by the first part of their names.
constexpr std::array<std::string_view, 4> kFast = {"verbs", "efa", "cxi", "opx"};
// Those that are not used: `shm` has no descriptor to wait for and leaves files behind processes
// that are killed (transport shared is there for one machine), `sockets` is given up by libfabric
// and fails its first message, and datagrams below `ofi_rxd` reach a tenth of what TCP does.
// `net` below another one is an experiment of libfabric 1.17, which lost messages of a peer beside
// those of strangers (tests/csrc/transport/fabric_test.cc under ThreadSanitizer).
constexpr std::array<std::string_view, 3> kUnused = {"shm", "sockets", "udp"};
constexpr std::string_view kUnusedBelow = "net;";

template <size_t kCount>
bool is_one_of(const std::string& provider, const std::array<std::string_view, kCount>& names) {
  const std::string_view first = std::string_view(provider).substr(0, provider.find(';'));
  return std::find(names.begin(), names.end(), first) != names.end();
}

struct FreeInfos {
  const Libfabric* library;
  void operator()(fi_info* infos) const { library->fi_freeinfo(infos); }
};
using Infos = std::unique_ptr<fi_info, FreeInfos>;

// What a path asks of a provider.
Infos hints_of(const Libfabric& library) {
  Infos hints(library.fi_dupinfo(nullptr), FreeInfos{&library});
  if (hints == nullptr) return hints;
  hints->caps = FI_MSG | FI_SOURCE;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->tx_attr->msg_order = hints->rx_attr->msg_order = FI_ORDER_SAS;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  hints->domain_attr->cq_data_size = sizeof(uint32_t);  // the slot
  return hints;
}

bool has_internet_addresses(const fi_info& info) {
  return info.addr_format == FI_SOCKADDR || info.addr_format == FI_SOCKADDR_IN ||
         info.addr_format == FI_SOCKADDR_IN6;
}

FabricProvider provider_of(const fi_info& info) {
  FabricProvider provider{info.fabric_attr->prov_name, info.ep_attr->protocol,
                          info.ep_attr->protocol_version, false};
  provider.is_fast = is_one_of(provider.name, kFast);
  return provider;
}

bool is_same(const FabricProvider& one, const FabricProvider& other) {
  return one.name == other.name && one.protocol == other.protocol &&
         one.protocol_version == other.protocol_version;
}

// What libfabric has said, by address of this machine; none is the empty one. It takes 0.03 to 0.4
// s to say, which a worker that comes back would pay for each provider. Addresses are few; should
// they not be, all are asked for again.
class KnownInfos {
 public:
  Result<std::shared_ptr<const fi_info>> at(const Libfabric& library, const std::string& node) {
    const std::lock_guard lock(mutex_);
    if (const auto known = by_node_.find(node); known != by_node_.end()) return known->second;
    auto asked = ask(library, node);
    if (!asked.ok()) return std::move(asked).error();
    const std::shared_ptr<const fi_info> found = std::move(asked).value();
    if (by_node_.size() == kMost) by_node_.clear();
    if (found != nullptr) by_node_[node] = found;
    return found;
  }

  // Has libfabric asked again: what it said could not be opened.
  void forget() {
    const std::lock_guard lock(mutex_);
    by_node_.clear();
  }

 private:
  static constexpr size_t kMost = 64;
  static Result<Infos> ask(const Libfabric& library, const std::string& node);

  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const fi_info>> by_node_;
};

KnownInfos& known_infos() {
  static KnownInfos* const known = new KnownInfos;  // never freed: threads may use it at the end
  return *known;
}

// Returns what libfabric knows; nothing where it knows nothing that fits. `node` is a numeric
// address of this machine, or empty.
Result<Infos> KnownInfos::ask(const Libfabric& library, const std::string& node) {
  const Infos hints = hints_of(library);
  if (hints == nullptr)
    return Error{ErrorCode::kOutOfMemory, "transport fabric: no memory for fi_info"};
  const KeptSignalHandlers handlers;  // the first question loads the providers
  fi_info* found = nullptr;
  const char* const service = node.empty() ? nullptr : "0";  // any free port
  const int returned = library.fi_getinfo(kVersion, node.empty() ? nullptr : node.c_str(), service,
                                          node.empty() ? 0 : FI_SOURCE, hints.get(), &found);
  if (returned != 0 && returned != -FI_ENODATA)
    return library.error("transport fabric: fi_getinfo", returned);
  return Infos(found, FreeInfos{&library});
}

// Returns a copy of what libfabric knows of one provider at an address of this machine.
Result<Infos> info_of(const Libfabric& library, const FabricProvider& provider,
                      const std::string& local_host) {
  const std::string here = local_host.empty() ? "127.0.0.1" : local_host;
  // Addresses that are no internet addresses cannot be asked for by one.
  for (const std::string& node : {here, std::string()}) {
    auto infos = known_infos().at(library, node);
    if (!infos.ok()) return std::move(infos).error();
    for (const fi_info* info = infos.value().get(); info != nullptr; info = info->next) {
      if (!is_same(provider_of(*info), provider)) continue;
      if (node.empty() && has_internet_addresses(*info)) continue;  // another interface's
      Infos one(library.fi_dupinfo(info), FreeInfos{&library});
      if (one == nullptr)
        return Error{ErrorCode::kOutOfMemory, "transport fabric: no memory for fi_info"};
      return one;
    }
  }
  return Error{ErrorCode::kUnsupported, "transport fabric: provider " + provider.name +
                                            " has no interface with the address " + here};
}

}  // namespace

Result<std::vector<FabricProvider>> fabric_providers() {
  auto library = load_libfabric();
  if (!library.ok()) return std::move(library).error();
  auto infos = known_infos().at(*library.value(), "");
  if (!infos.ok()) return std::move(infos).error();
  std::vector<FabricProvider> found;
  for (const fi_info* info = infos.value().get(); info != nullptr; info = info->next) {
    FabricProvider provider = provider_of(*info);
    const bool is_known = std::any_of(found.begin(), found.end(), [&](const FabricProvider& one) {
      return is_same(one, provider);
    });
    const bool is_used =
        !is_one_of(provider.name, kUnused) && !provider.name.starts_with(kUnusedBelow);
    if (!is_known && is_used) found.push_back(std::move(provider));
  }
  if (found.empty()) {
    return Error{ErrorCode::kUnsupported,
                 "transport fabric: libfabric has no provider here that sends messages between "
                 "unconnected endpoints and names their sender (`fi_info -t FI_EP_RDM` lists those "
                 "that it has; the variable FI_PROVIDER restricts them)"};
  }
  // Of the others, those that are layered upon another provider come last: they add its time.
  const auto rank = [](const FabricProvider& one) {
    return one.is_fast ? 0 : one.name.find(';') == std::string::npos ? 1 : 2;
  };
  std::stable_sort(found.begin(), found.end(),
                   [&](const FabricProvider& one, const FabricProvider& other) {
                     return rank(one) < rank(other);
                   });
  return found;
}

Result<FabricEndpoint> FabricEndpoint::open(const FabricProvider& provider,
                                            const std::string& local_host,
                                            uint64_t max_message_bytes, size_t num_sends,
                                            size_t num_receives) {
  auto library = load_libfabric();
  if (!library.ok()) return std::move(library).error();
  auto info = info_of(*library.value(), provider, local_host);
  if (!info.ok()) return std::move(info).error();
  if (info.value()->ep_attr->max_msg_size < max_message_bytes) {
    return Error{ErrorCode::kUnsupported,
                 "transport fabric: provider " + provider.name + " sends messages of up to " +
                     std::to_string(info.value()->ep_attr->max_msg_size) +
                     " bytes; the slots have " + std::to_string(max_message_bytes) +
                     ": lower the batch capacity"};
  }
  FabricEndpoint made;
  made.library_ = library.value();
  made.provider_ = provider;
  if (auto opened = made.open_objects(*info.value(), num_sends, num_receives); !opened.ok()) {
    known_infos().forget();
    const std::string at = local_host.empty() ? "the loopback interface" : local_host;
    return std::move(opened).error().with("transport fabric at " + at);
  }
  return made;
}

// Every step of opening has the same form: libfabric fills a pointer, or says why not.
#define DFLASH_OPEN(owner, Type, what, call)                                      \
  do {                                                                            \
    Type* opened = nullptr;                                                       \
    if (const int returned = (call); returned != 0) return error(what, returned); \
    (owner).reset(opened);                                                        \
  } while (0)

Status FabricEndpoint::open_objects(fi_info& info, size_t num_sends, size_t num_receives) {
  memory_mode_ = static_cast<uint64_t>(info.domain_attr->mr_mode);
  info.tx_attr->size = std::max(info.tx_attr->size, num_sends);
  info.rx_attr->size = std::max(info.rx_attr->size, num_receives);
  DFLASH_OPEN(fabric_, fid_fabric, "fi_fabric",
              library_->fi_fabric(info.fabric_attr, &opened, nullptr));
  DFLASH_OPEN(domain_, fid_domain, "fi_domain",
              ::fi_domain(fabric_.get(), &info, &opened, nullptr));
  fi_cq_attr queue{};
  queue.size = num_sends + num_receives;
  queue.format = FI_CQ_FORMAT_DATA;
  queue.wait_obj = FI_WAIT_FD;
  DFLASH_OPEN(queue_, fid_cq, "a completion queue with a descriptor to wait for",
              ::fi_cq_open(domain_.get(), &queue, &opened, nullptr));
  if (const int returned = ::fi_control(&queue_->fid, FI_GETWAIT, &wait_fd_); returned != 0)
    return error("the descriptor of its completion queue", returned);
  fi_av_attr peers{};
  peers.type = FI_AV_UNSPEC;
  peers.count = 1;
  DFLASH_OPEN(peers_, fid_av, "fi_av_open", ::fi_av_open(domain_.get(), &peers, &opened, nullptr));
  DFLASH_OPEN(endpoint_, fid_ep, "fi_endpoint",
              ::fi_endpoint(domain_.get(), &info, &opened, nullptr));
  int returned = ::fi_ep_bind(endpoint_.get(), &peers_->fid, 0);
  if (returned == 0) returned = ::fi_ep_bind(endpoint_.get(), &queue_->fid, FI_TRANSMIT | FI_RECV);
  if (returned == 0) returned = ::fi_enable(endpoint_.get());
  if (returned != 0) return error("its endpoint cannot be enabled", returned);
  address_.resize(kMaxFabricAddressBytes);
  size_t num_bytes = address_.size();
  returned = ::fi_getname(&endpoint_->fid, address_.data(), &num_bytes);
  if (returned != 0) return error("the address of its endpoint", returned);
  address_.resize(std::min(num_bytes, address_.size()));
  return ok();
}

#undef DFLASH_OPEN

Status FabricEndpoint::meet(std::span<const std::byte> peer) {
  // A provider reads as many bytes as its own form of address has.
  if (peer.size() != address_.size()) {
    return Error{ErrorCode::kProtocol, "transport fabric: the peer's address has " +
                                           std::to_string(peer.size()) + " bytes; those of " +
                                           provider_.name + " have " +
                                           std::to_string(address_.size())};
  }
  if (::fi_av_insert(peers_.get(), peer.data(), 1, &peer_, 0, nullptr) == 1) return ok();
  return Error{ErrorCode::kProtocol,
               "transport fabric: " + provider_.name + " does not take the peer's address"};
}

Status FabricEndpoint::use_memory(std::span<std::byte> memory) {
  if ((memory_mode_ & FI_MR_LOCAL) == 0) return ok();
  fid_mr* opened = nullptr;
  int returned = ::fi_mr_reg(domain_.get(), memory.data(), memory.size(), FI_SEND | FI_RECV, 0, 0,
                             0, &opened, nullptr);
  if (returned != 0)
    return error("registering " + std::to_string(memory.size()) + " bytes of slots", returned);
  memory_.reset(opened);
  if ((memory_mode_ & FI_MR_ENDPOINT) == 0) return ok();
  returned = ::fi_mr_bind(opened, &endpoint_->fid, 0);
  if (returned == 0) returned = ::fi_mr_enable(opened);
  return returned == 0 ? ok() : Status(error("binding the slots to the endpoint", returned));
}

FabricEndpoint::Failure FabricEndpoint::take_failure() {
  fi_cq_err_entry entry{};
  if (::fi_cq_readerr(queue_.get(), &entry, 0) != 1) return {};
  char buffer[256] = "";
  const char* const text =
      ::fi_cq_strerror(queue_.get(), entry.prov_errno, entry.err_data, buffer, sizeof buffer);
  return {
      entry.op_context, entry.flags, entry.err,
      std::string(library_->fi_strerror(entry.err)) + " (" + (text == nullptr ? "" : text) + ")"};
}

}  // namespace dflash::transport
