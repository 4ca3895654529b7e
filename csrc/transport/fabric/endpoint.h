// One open endpoint of a provider, with its completion queue and what both need.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "transport/fabric/fabric.h"
#include "transport/fabric/libfabric.h"

namespace dflash::transport {

template <class Object>
struct CloseFid {
  void operator()(Object* object) const { ::fi_close(&object->fid); }
};
template <class Object>
using OwnedFid = std::unique_ptr<Object, CloseFid<Object>>;

// Movable; not thread-safe, and neither is anything of libfabric that belongs to it
// (FI_THREAD_DOMAIN). What is under way at its end is given up, so that memory and contexts of
// operations must outlive it.
class FabricEndpoint {
 public:
  // Opens one of `provider` for messages of up to `max_message_bytes`, of which at most `num_sends`
  // and `num_receives` are under way. It is bound to the interface with the numeric address
  // `local_host`; empty stands for the loopback interface. Providers whose addresses are no
  // internet addresses choose by themselves.
  //
  // Errors: kUnsupported naming what the provider lacks, kOutOfMemory, kSystem.
  static Result<FabricEndpoint> open(const FabricProvider& provider, const std::string& local_host,
                                     uint64_t max_message_bytes, size_t num_sends,
                                     size_t num_receives);

  const FabricProvider& provider() const { return provider_; }
  // By which peers reach it, at most kMaxFabricAddressBytes.
  std::span<const std::byte> address() const { return address_; }

  // Says at which address the one peer is. Errors: kProtocol for none of this provider's form.
  Status meet(std::span<const std::byte> peer);
  // Has the device know `memory`, once, before it is used; it must outlive this object. Errors:
  // kOutOfMemory, kSystem.
  Status use_memory(std::span<std::byte> memory);

  // Returns what libfabric returned: 0, or a negative error number, -FI_EAGAIN for "not now".
  // `context` is the operation's until its completion has been read.
  ssize_t send(std::span<const std::byte> message, uint32_t slot, fi_context2* context) {
    return ::fi_senddata(endpoint_.get(), message.data(), message.size(), memory_key(), slot, peer_,
                         context);
  }
  ssize_t receive(std::span<std::byte> room, fi_context2* context) {
    return ::fi_recv(endpoint_.get(), room.data(), room.size(), memory_key(), FI_ADDR_UNSPEC,
                     context);
  }
  // Reads completions and whose they are, as fi_cq_readfrom(3) does.
  ssize_t read(std::span<fi_cq_data_entry> completions, fi_addr_t* sources) {
    return ::fi_cq_readfrom(queue_.get(), completions.data(), completions.size(), sources);
  }
  // Does the same, and waits for a completion for `wait_ms` at most. It takes away the signal that
  // a former completion has left in the queue's descriptor, which not every provider's `fi_trywait`
  // does: with `net` of libfabric 1.17 that descriptor would be readable for ever.
  ssize_t await(std::span<fi_cq_data_entry> completions, fi_addr_t* sources, int wait_ms) {
    return ::fi_cq_sreadfrom(queue_.get(), completions.data(), completions.size(), sources, nullptr,
                             wait_ms);
  }
  // Takes the completion that went wrong. Its text is the provider's.
  struct Failure {
    void* context = nullptr;
    uint64_t flags = 0;
    int number = 0;
    std::string text;
  };
  Failure take_failure();
  bool is_peer(fi_addr_t source) const { return source == peer_; }

  // The descriptor that is readable once there are completions, as long as `may_sleep` was true
  // just before.
  int wait_fd() const { return wait_fd_; }
  bool may_sleep() {
    fid* const queue = &queue_->fid;
    fid* queues[] = {queue};
    return ::fi_trywait(fabric_.get(), queues, 1) == FI_SUCCESS;
  }
  Error error(const std::string& what, int64_t returned) const {
    return library_->error("fabric channel (" + provider_.name + "): " + what, returned);
  }

 private:
  FabricEndpoint() = default;
  Status open_objects(fi_info& info, size_t num_sends, size_t num_receives);
  void* memory_key() const { return memory_ == nullptr ? nullptr : ::fi_mr_desc(memory_.get()); }

  const Libfabric* library_ = nullptr;
  FabricProvider provider_;
  std::vector<std::byte> address_;
  uint64_t memory_mode_ = 0;  // FI_MR_*: what the provider asks of memory
  int wait_fd_ = -1;          // the queue's
  fi_addr_t peer_ = FI_ADDR_UNSPEC;
  // Closed from the last to the first, because each uses those above it.
  OwnedFid<fid_fabric> fabric_;
  OwnedFid<fid_domain> domain_;
  OwnedFid<fid_cq> queue_;
  OwnedFid<fid_av> peers_;
  OwnedFid<fid_mr> memory_;
  OwnedFid<fid_ep> endpoint_;
};

}  // namespace dflash::transport
