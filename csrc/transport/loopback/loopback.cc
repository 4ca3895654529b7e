// The loopback: a ring in memory of this process, with one eventfd bell per side.
// SPDX-License-Identifier: Apache-2.0
#include "transport/loopback/loopback.h"

#include <fcntl.h>
#include <sys/eventfd.h>

#include <string>

#include "base/owned_fd.h"
#include "base/result.h"
#include "transport/ring/layout.h"
#include "transport/ring/mapping.h"
#include "transport/ring/ring_channel.h"

namespace dflash::transport {
namespace {

struct BothMappings {
  Mapping host, worker;
};

// Two descriptors of one bell, so that either end may be closed first.
struct Bell {
  OwnedFd sleeper, ringer;
};

Result<Bell> make_bell() {
  Bell bell;
  bell.sleeper = OwnedFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (bell.sleeper.is_open())
    bell.ringer = OwnedFd(::fcntl(bell.sleeper.get(), F_DUPFD_CLOEXEC, 0));
  if (!bell.ringer.is_open()) {
    return system_error("cannot make a loopback bell");
  }
  return bell;
}

Result<Mapping> map_side(Side side, const SlotGeometry& geometry) {
  auto layout = SegmentLayout::of(side, geometry);
  if (!layout.ok()) return std::move(layout).error();
  return Mapping::create(layout.value().total_bytes);
}

}  // namespace

Result<ChannelPair> make_loopback(const SlotGeometry& geometry) {
  auto host = map_side(Side::kHost, geometry);
  if (!host.ok()) return std::move(host).error();
  auto worker = map_side(Side::kWorker, geometry);
  if (!worker.ok()) return std::move(worker).error();
  auto host_bell = make_bell();
  if (!host_bell.ok()) return std::move(host_bell).error();
  auto worker_bell = make_bell();
  if (!worker_bell.ok()) return std::move(worker_bell).error();

  auto memory = std::make_shared<BothMappings>(
      BothMappings{std::move(host).value(), std::move(worker).value()});
  RingEnds host_ends{Side::kHost,
                     geometry,
                     "loopback",
                     memory->host.base(),
                     memory->worker.base(),
                     true,
                     memory,
                     std::move(host_bell.value().sleeper),
                     std::move(worker_bell.value().ringer)};
  RingEnds worker_ends{Side::kWorker,
                       geometry,
                       "loopback",
                       memory->worker.base(),
                       memory->host.base(),
                       true,
                       memory,
                       std::move(worker_bell.value().sleeper),
                       std::move(host_bell.value().ringer)};
  return ChannelPair{make_ring_channel(std::move(host_ends)),
                     make_ring_channel(std::move(worker_ends))};
}

}  // namespace dflash::transport
