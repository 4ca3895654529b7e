// What other rooms have made, as Python holds it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <memory>
#include <mutex>
#include <utility>

#include "bindings/errors.h"
#include "compute/cpu/instruction_sets.h"
#include "compute/cpu/scratch_pool.h"
#include "compute/cpu/thread_pool.h"
#include "plugin/host_device.h"
#include "plugin/plugin_backend.h"
#include "transport/secure/secure_socket.h"

namespace dflash::bindings {

// Deletes an object only in the process that made it. A forked child has a copy of the object but
// not of its threads, and joining them there would never end.
struct DeleteInOwnProcess {
  pid_t owner = ::getpid();
  template <class T>
  void operator()(T* object) const {
    if (::getpid() == owner) delete object;
  }
};

// The compute threads of a host's operators. Operators keep the pool alive.
struct HostPoolBox {
  std::shared_ptr<compute::ThreadPool> pool;
  compute::Isa isa;  // whose kernels the operators take; never the reference
  // Where the weights of linear layers lie.
  std::shared_ptr<compute::PageArena> arena;
  // Where linear layers keep their rows while they compute.
  std::shared_ptr<compute::ScratchPool<compute::ScratchBlock>> scratch;
};

// An encrypted connection, owned here until a channel, a pulse or a relay takes
// it.
struct SecureSocketBox {
  // Control messages are sent by any thread while one receives.
  std::mutex mutex;
  std::unique_ptr<transport::SecureSocket> socket;

  std::unique_ptr<transport::SecureSocket> take() {
    const std::lock_guard lock(mutex);
    if (socket == nullptr)
      raise(Error{ErrorCode::kClosed, "this connection was already handed over"});
    return std::move(socket);
  }
};

// The host's device. The box is shared by all objects that use the device; the last one closes it.
struct HostDeviceBox {
  std::shared_ptr<plugin::HostDevice> device;
};

// An opened device, shared with the worker that computes on it. While a worker serves with the
// backend, only that worker may use it.
struct BackendDevice {
  std::shared_ptr<plugin::PluginBackend> backend;
};

// The worker's share of a device's backend.
class SharedBackend final : public compute::ExpertBackend {
 public:
  explicit SharedBackend(std::shared_ptr<plugin::PluginBackend> shared)
      : shared_(std::move(shared)) {}
  Result<std::unique_ptr<compute::ExpertLayer>> create_layer(
      const compute::FfnSpec& spec, uint32_t num_local_experts, compute::ResidentFormats formats,
      compute::NumericsClass numerics) override {
    return shared_->create_layer(spec, num_local_experts, formats, numerics);
  }

  Result<uint64_t> predicted_bytes(const compute::FfnSpec& spec, uint32_t num_local_experts,
                                   compute::ResidentFormats formats,
                                   compute::NumericsClass numerics) const override {
    return shared_->predicted_bytes(spec, num_local_experts, formats, numerics);
  }

 private:
  std::shared_ptr<plugin::PluginBackend> shared_;
};

}  // namespace dflash::bindings
