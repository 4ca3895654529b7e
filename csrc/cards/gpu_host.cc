// SPDX-License-Identifier: Apache-2.0
#include "cards/gpu_host.h"

#include <utility>

namespace dflash::compute::gpu {

std::string GpuHost::name() const {
  const DeviceFacts& found = facts();
  return found.backend + " " + std::to_string(found.index) + " (" + found.name + ")";
}

Result<std::byte*> GpuHost::allocate_pinned(uint64_t num_bytes) {
  const Turn turn(*this);
  auto memory = runtime_->allocate_staging(num_bytes);
  if (!memory.ok()) return named(std::move(memory).error());
  return memory;
}

void GpuHost::release_pinned(std::byte* memory) {
  const Turn turn(*this);
  if (!is_hung_) runtime_->release_staging(memory);  // a copy that never ends may still use it
}

Status GpuHost::copy_in(std::span<const HostTransfer> pieces, std::chrono::nanoseconds at_most) {
  const Turn turn(*this);
  for (const HostTransfer& piece : pieces) {
    Status queued = runtime_->copy_in(piece.device, piece.host, piece.num_bytes);
    if (!queued.ok()) return named(std::move(queued).error());
  }
  return drain(at_most);
}

Status GpuHost::copy_out(std::span<const HostTransfer> pieces, std::chrono::nanoseconds at_most) {
  const Turn turn(*this);
  for (const HostTransfer& piece : pieces) {
    Status queued = runtime_->copy_out(piece.host, piece.device, piece.num_bytes);
    if (!queued.ok()) return named(std::move(queued).error());
  }
  return drain(at_most);
}

Status GpuHost::drain(std::chrono::nanoseconds at_most) {
  if (is_hung_)
    return Error{ErrorCode::kWorkerFailed,
                 name() + " did not answer within its limit before; restart the process"};
  auto is_done = runtime_->wait(at_most);
  if (!is_done.ok()) return named(std::move(is_done).error());
  if (is_done.value()) return ok();
  is_hung_ = true;
  return Error{
      ErrorCode::kTimeout,
      name() + " did not finish a copy within " +
          std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(at_most).count()) +
          " ms; it counts as hung"};
}

}  // namespace dflash::compute::gpu
