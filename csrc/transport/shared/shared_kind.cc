// The handshake of shared memory. Each end creates its own segment and attaches the other's.
// SPDX-License-Identifier: Apache-2.0
#include "transport/shared/shared_kind.h"

#include <sys/eventfd.h>

#include <utility>

#include "base/result.h"
#include "transport/kinds.h"
#include "transport/shared/segment.h"

namespace dflash::transport {
namespace {

class SharedOffer final : public PathOffer {
 public:
  SharedOffer(const PathTerms& terms, Segment own, OwnedFd bell)
      : terms_(terms), own_(std::move(own)), bell_(std::move(bell)) {}

  std::vector<int> descriptors() const override { return {own_.fd(), bell_.get()}; }
  Result<std::unique_ptr<Channel>> complete(Handover answer) override {
    DFLASH_TRY(check_handover(kSharedKind, "answer", answer, 1));
    auto peer = Segment::attach(std::move(answer.descriptors[0]), Side::kWorker, terms_.geometry,
                                terms_.generation, terms_.is_open);
    if (!peer.ok()) return std::move(peer).error();
    return make_shared_channel(Side::kHost, terms_.geometry, std::move(own_),
                               std::move(peer).value(), std::move(bell_));
  }

 private:
  const PathTerms terms_;
  Segment own_;
  OwnedFd bell_;
};

}  // namespace

Result<std::unique_ptr<PathOffer>> offer_shared(const PathTerms& terms) {
  auto own = Segment::create(Side::kHost, terms.geometry, terms.generation);
  if (!own.ok()) return std::move(own).error();
  OwnedFd bell(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!bell.is_open()) return system_error("cannot make the bell of a shared path");
  return std::unique_ptr<PathOffer>(
      std::make_unique<SharedOffer>(terms, std::move(own).value(), std::move(bell)));
}

Result<Acceptance> accept_shared(const PathTerms& terms, Handover offered) {
  DFLASH_TRY(check_handover(kSharedKind, "offer", offered, 2));
  auto peer = Segment::attach(std::move(offered.descriptors[0]), Side::kHost, terms.geometry,
                              terms.generation);
  if (!peer.ok()) return std::move(peer).error();
  auto own = Segment::create(Side::kWorker, terms.geometry, terms.generation, terms.is_open);
  if (!own.ok()) return std::move(own).error();
  auto passed = OwnedFd::duplicate(own.value().fd());
  if (!passed.ok()) return std::move(passed).error();
  auto channel = make_shared_channel(Side::kWorker, terms.geometry, std::move(own).value(),
                                     std::move(peer).value(), std::move(offered.descriptors[1]));
  if (!channel.ok()) return std::move(channel).error();
  Acceptance accepted{std::move(channel).value(), {}};
  accepted.answer.descriptors.push_back(std::move(passed).value());
  return accepted;
}

}  // namespace dflash::transport
