// Compares the states of files.
// SPDX-License-Identifier: Apache-2.0
#include "store/watched_files.h"

#include <algorithm>
#include <utility>

namespace dflash::store {

Status WatchedFiles::add(std::shared_ptr<const MappedFile> file) {
  const std::lock_guard lock(mutex_);
  const bool is_there = std::any_of(files_.begin(), files_.end(),
                                    [&](const Watched& one) { return one.file == file; });
  if (is_there) return ok();
  auto state = file->settled_state();
  if (!state.ok()) return std::move(state).error();
  files_.push_back({std::move(file), state.value(), state.value()});
  return ok();
}

bool WatchedFiles::are_as_seen() const {
  const std::lock_guard lock(mutex_);
  return std::all_of(files_.begin(), files_.end(),
                     [](const Watched& one) { return one.file->is_as(one.seen); });
}

bool WatchedFiles::are_as_first() const {
  const std::lock_guard lock(mutex_);
  return std::all_of(files_.begin(), files_.end(), [](const Watched& one) {
    return one.seen == one.first && one.file->is_as(one.first);
  });
}

Status WatchedFiles::look_again() {
  const std::lock_guard lock(mutex_);
  ++age_;
  for (Watched& one : files_) {
    auto state = one.file->settled_state();
    if (!state.ok()) return std::move(state).error();
    one.seen = state.value();
  }
  return ok();
}

std::string WatchedFiles::changed_path() const {
  const std::lock_guard lock(mutex_);
  for (const Watched& one : files_)
    if (!(one.seen == one.first) || !one.file->is_as(one.first)) return one.file->path();
  return files_.empty() ? "the checkpoint" : files_.front().file->path();
}

}  // namespace dflash::store
