// The background reader's thread. It holds a shard only for one step at a time, so that a shard can
// go away while it is being read.
// SPDX-License-Identifier: Apache-2.0
#include "store/background_reader.h"

#include <string>
#include <system_error>
#include <utility>

#include "store/lowest_priority.h"

namespace dflash::store {
namespace {

// The bytes read between two looks at whether to stop: what a disk delivers in milliseconds.
constexpr size_t kStepBytes = size_t{1} << 20;

}  // namespace

BackgroundReader::~BackgroundReader() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void BackgroundReader::add(const std::shared_ptr<ResidentShard>& shard) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back(shard);
  changed_.notify_all();
  if (thread_.joinable()) return;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    const std::lock_guard failure_lock(shard->failure_mutex_);
    shard->failure_ = Error{ErrorCode::kSystem,
                            std::string("cannot start the background reader: ") + error.what()};
    waiting_.pop_back();
  }
}

void BackgroundReader::run() {
  take_lowest_priority();
  for (;;) {
    std::unique_lock lock(mutex_);
    // This wait is for orders of this process itself, and the destructor ends it.
    changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
    if (stopping_) return;
    const std::weak_ptr<ResidentShard> shard = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    read(shard);
  }
}

// The shard is touched only while it is held here, for one step at a time. The files that its views
// refer to live as long as it does.
void BackgroundReader::read(const std::weak_ptr<ResidentShard>& shard) {
  for (uint32_t id = 0;; ++id) {
    std::optional<compute::ContentReader> reader;
    for (bool is_read = false; !is_read;) {
      const std::shared_ptr<ResidentShard> held = shard.lock();
      if (held == nullptr || id == held->sources_.size() || stopping_.load()) return;
      ResidentShard::Expert& expert = held->sources_[id];
      if (expert.is_unsummed.load(std::memory_order_acquire))
        static_cast<void>(held->scrub_expert(id, stopping_));  // panels never fail to be read
      if (expert.source.load(std::memory_order_acquire) != ResidentShard::Source::kUnread) break;
      if (!reader) reader.emplace(expert.weights);
      auto step = reader->read(kStepBytes);
      if (!step.ok()) {
        const std::lock_guard lock(held->failure_mutex_);
        held->failure_ = std::move(step).error();
        return;
      }
      is_read = step.value();
      if (!is_read) continue;
      // Nobody knows what it was; calls of the time before have used other bytes, maybe.
      if (!held->watched_.are_as_first()) {
        const std::lock_guard lock(held->failure_mutex_);
        held->failure_ = held->changed_error(id, "was changed before all of it had been read");
        return;
      }
      expert.checksum = reader->value();
      expert.source.store(ResidentShard::Source::kRead, std::memory_order_release);
    }
  }
}

}  // namespace dflash::store
