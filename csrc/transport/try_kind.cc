// What `doctor` does with every kind of the table: it makes both ends in one process and sends one
// message each way.
// SPDX-License-Identifier: Apache-2.0
#include <thread>
#include <utility>

#include "base/result.h"
#include "transport/kinds.h"
#include "transport/stream/stream.h"

namespace dflash::transport {
namespace {

constexpr int64_t kPatienceNs = 1'000'000'000;  // ample, as a wake-up takes microseconds
constexpr size_t kMessageBytes = 64;

// Passes an offer on as the control plane does between two processes.
Result<Handover> pass(const PathOffer& sent) {
  Handover received;
  received.bytes.assign(sent.bytes().begin(), sent.bytes().end());
  for (const int descriptor : sent.descriptors()) {
    auto copy = OwnedFd::duplicate(descriptor);
    if (!copy.ok()) return std::move(copy).error();
    received.descriptors.push_back(std::move(copy).value());
  }
  return received;
}

struct BothEnds {
  std::unique_ptr<Channel> host, worker;
};

Result<BothEnds> connect_ends(const TransportKind& kind) {
  PathTerms terms;
  terms.geometry = {2, kMessageBytes, kMessageBytes};
  terms.generation = 1;
  std::pair<OwnedFd, OwnedFd> dialled;
  if (kind.is_dialled) {
    auto pair = tcp_pair();
    if (!pair.ok()) return std::move(pair).error();
    dialled = std::move(pair).value();
  }
  auto offer = kind.offer(terms);
  if (!offer.ok()) return std::move(offer).error();
  auto offered = pass(*offer.value());
  if (!offered.ok()) return std::move(offered).error();
  if (kind.is_dialled) offered.value().descriptors.push_back(std::move(dialled.second));
  auto accepted = kind.accept(terms, std::move(offered).value());
  if (!accepted.ok()) return std::move(accepted).error();
  Handover answer = std::move(accepted.value().answer);
  if (kind.is_dialled) answer.descriptors.push_back(std::move(dialled.first));
  auto completed = offer.value()->complete(std::move(answer));
  if (!completed.ok()) return std::move(completed).error();
  return BothEnds{std::move(completed).value(), std::move(accepted.value().channel)};
}

// Takes one message as a sleeper does, so that the wake-up is tried as well.
Status receive(Channel& channel) {
  WaitEntry entry{&channel, std::nullopt, std::nullopt};
  wait_any({&entry, 1}, Deadline::after_ns(kPatienceNs), 0);
  if (entry.error) return std::move(*entry.error);
  if (entry.arrival && entry.arrival->bytes.size() == kMessageBytes) return ok();
  return Error{ErrorCode::kTimeout, "a message did not arrive within a second"};
}

}  // namespace

Status try_kind(const TransportKind& kind) {
  auto made = connect_ends(kind);
  if (!made.ok()) return std::move(made).error();
  BothEnds& ends = made.value();
  Status answered = ok();
  std::thread worker([&] {
    answered = receive(*ends.worker);
    if (answered.ok()) answered = ends.worker->publish(1, kMessageBytes);
  });
  Status received = ends.host->publish(1, kMessageBytes);
  if (received.ok()) received = receive(*ends.host);
  worker.join();
  DFLASH_TRY(answered);
  return received;
}

}  // namespace dflash::transport
