// Sends queued messages by vectored writes.
// SPDX-License-Identifier: Apache-2.0
#include "transport/stream/send_queue.h"

#include <sys/uio.h>

#include <algorithm>

namespace dflash::transport {
namespace {

// A message has two pieces. More messages gain nothing once a write carries several.
constexpr size_t kMessagesPerWrite = 8;

}  // namespace

void SendQueue::push(uint32_t slot, std::span<const std::byte> message) {
  check(num_queued_ < messages_.size(), "more messages queued than slots exist");
  Message& queued = at(num_queued_++);
  const uint64_t fields[2] = {slot, message.size()};  // the slot and its zero make one u64
  for (size_t i = 0; i < kStreamPrefixBytes; ++i)
    queued.prefix[i] = static_cast<std::byte>(fields[i / 8] >> (8 * (i % 8)));
  queued.bytes = message;
}

Result<size_t> SendQueue::flush(StreamSocket& socket) {
  size_t total = 0;
  while (num_queued_ > 0) {
    std::array<iovec, 2 * kMessagesPerWrite> pieces;
    size_t num_pieces = 0;
    size_t offered = 0;
    size_t skip = sent_of_first_;
    const auto offer = [&](std::span<const std::byte> piece) {
      const size_t skipped = std::min(skip, piece.size());
      skip -= skipped;
      piece = piece.subspan(skipped);
      if (piece.empty()) return;
      offered += piece.size();
      pieces[num_pieces++] = {const_cast<std::byte*>(piece.data()), piece.size()};
    };
    for (size_t i = 0; i < std::min(num_queued_, kMessagesPerWrite); ++i) {
      offer(at(i).prefix);
      offer(at(i).bytes);
    }
    auto sent = socket.send(std::span(pieces).first(num_pieces));
    if (!sent.ok()) return std::move(sent).error().with("stream channel");
    const size_t taken = sent.value();
    consume(taken);
    total += taken;
    if (taken < offered) return total;
  }
  return total;
}

void SendQueue::consume(size_t num_bytes) {
  sent_of_first_ += num_bytes;
  while (num_queued_ > 0 && sent_of_first_ >= kStreamPrefixBytes + at(0).bytes.size()) {
    sent_of_first_ -= kStreamPrefixBytes + at(0).bytes.size();
    first_ = (first_ + 1) % messages_.size();
    --num_queued_;
  }
}

}  // namespace dflash::transport
