// Messages that are held back until a time, oldest first; none overtakes the one before it. Private
// to the decorators of this folder.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <utility>

namespace dflash::transport {

template <class Message>
class HeldQueue {
 public:
  bool is_empty() const { return held_.empty(); }
  size_t num_held() const { return held_.size(); }
  void push(int64_t due_ns, Message message) {
    if (!held_.empty()) due_ns = std::max(due_ns, held_.back().first);
    held_.emplace_back(due_ns, std::move(message));
  }
  std::optional<Message> take_due(int64_t now_ns) {
    if (held_.empty() || held_.front().first > now_ns) return std::nullopt;
    std::optional<Message> message(std::move(held_.front().second));
    held_.pop_front();
    return message;
  }
  // When the next message is due; max() where none is held.
  int64_t next_due_ns() const {
    return held_.empty() ? std::numeric_limits<int64_t>::max() : held_.front().first;
  }

 private:
  std::deque<std::pair<int64_t, Message>> held_;  // bounded by whoever pushes
};

// A publish() that is held back.
struct HeldSend {
  uint32_t slot;
  size_t bytes;
};

}  // namespace dflash::transport
