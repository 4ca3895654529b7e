// The floor of a fabric: two endpoints of the provider that a path takes, each with one receive
// posted ahead, waiting as a channel does, without slots or checks.
// SPDX-License-Identifier: Apache-2.0
#include <poll.h>

#include <array>

#include "measure/floor_pipe.h"
#include "transport/fabric/fabric.h"

#if __has_include(<rdma/fi_endpoint.h>)

#include "base/clock.h"
#include "transport/fabric/endpoint.h"

namespace dflash::measure {
namespace {

using transport::FabricEndpoint;

constexpr int64_t kTimeoutNs = 10'000'000'000;
constexpr int64_t kRetryNs = 20'000;
constexpr int kSettleMs = 1;                                                // as of a channel
constexpr timespec kSleep{0, 100'000'000}, kSleepWhileSending{0, 100'000};  // as a channel sleeps

class FabricPipe final : public Pipe {
 public:
  FabricPipe(FabricEndpoint endpoint, size_t payload_bytes)
      : room_(payload_bytes), endpoint_(std::move(endpoint)) {}

  Status open() { return post(); }

  Status send(std::span<const std::byte> payload) override {
    const Deadline deadline = Deadline::after_ns(kTimeoutNs);
    for (;;) {
      const ssize_t returned = endpoint_.send(payload, 0, &send_);
      if (returned == 0) break;
      if (returned != -FI_EAGAIN) return endpoint_.error("sending failed", returned);
      DFLASH_TRY(read());
      nap_ns(kRetryNs);
      if (deadline.has_passed()) return no_answer();
    }
    is_sending_ = true;
    // A provider may move the bytes of a long message only while its sender reads completions.
    while (is_sending_) DFLASH_TRY(advance(deadline));
    return ok();
  }

  Result<std::span<const std::byte>> receive(std::span<std::byte> private_memory) override {
    const Deadline deadline = Deadline::after_ns(kTimeoutNs);
    while (!has_arrived_) DFLASH_TRY(advance(deadline));
    has_arrived_ = false;
    std::copy(room_.begin(), room_.end(), private_memory.begin());
    DFLASH_TRY(post());
    return std::span<const std::byte>(private_memory);
  }

 private:
  static Error no_answer() { return {ErrorCode::kTimeout, "floor: no answer within ten seconds"}; }

  Status post() {
    const ssize_t returned = endpoint_.receive(room_, &receive_);
    return returned == 0 ? ok() : Status(endpoint_.error("posting a receive failed", returned));
  }
  Status read() {
    Completions found;
    return take(endpoint_.read(found.entries, found.sources.data()), found);
  }
  // Reads what has completed, and sleeps where nothing has. A signal that a former completion left
  // in the descriptor is taken away first, as a channel does: else this would spin.
  Status advance(Deadline deadline) {
    const bool before[] = {is_sending_, has_arrived_};
    DFLASH_TRY(read());
    if (is_sending_ != before[0] || has_arrived_ != before[1]) return ok();
    if (deadline.has_passed()) return no_answer();
    if (!endpoint_.may_sleep()) return ok();
    pollfd awaited{endpoint_.wait_fd(), POLLIN, 0};
    if (::poll(&awaited, 1, 0) > 0) {
      Completions found;
      return take(endpoint_.await(found.entries, found.sources.data(), kSettleMs), found);
    }
    ::ppoll(&awaited, 1, is_sending_ ? &kSleepWhileSending : &kSleep, nullptr);
    return ok();
  }

  struct Completions {
    std::array<fi_cq_data_entry, 4> entries{};
    std::array<fi_addr_t, 4> sources{};
  };
  // Takes what a read returned: so many completions, or a negative error number.
  Status take(ssize_t got, const Completions& found) {
    if (got < 0 && got != -FI_EAGAIN) return endpoint_.error("reading completions failed", got);
    for (ssize_t at = 0; at < got; ++at) {
      const void* const done = found.entries[static_cast<size_t>(at)].op_context;
      if (done == &send_) is_sending_ = false;
      if (done == &receive_) has_arrived_ = true;
    }
    return ok();
  }

  std::vector<std::byte> room_;
  fi_context2 send_{}, receive_{};
  bool is_sending_ = false, has_arrived_ = false;
  FabricEndpoint endpoint_;
};

}  // namespace

Result<PipePair> make_fabric_pipes(size_t payload_bytes) {
  auto providers = transport::fabric_providers();
  if (!providers.ok()) return std::move(providers).error();
  std::vector<FabricEndpoint> ends;
  for (int end = 0; end < 2; ++end) {
    auto opened = FabricEndpoint::open(providers.value().front(), "", payload_bytes, 1, 1);
    if (!opened.ok()) return std::move(opened).error();
    ends.push_back(std::move(opened).value());
  }
  DFLASH_TRY(ends[0].meet(ends[1].address()));
  DFLASH_TRY(ends[1].meet(ends[0].address()));
  auto host = std::make_unique<FabricPipe>(std::move(ends[0]), payload_bytes);
  auto worker = std::make_unique<FabricPipe>(std::move(ends[1]), payload_bytes);
  DFLASH_TRY(host->open());
  DFLASH_TRY(worker->open());
  return PipePair{std::move(host), std::move(worker)};
}

}  // namespace dflash::measure

#else

namespace dflash::measure {

Result<PipePair> make_fabric_pipes(size_t) { return transport::fabric_providers().error(); }

}  // namespace dflash::measure

#endif
