// The mapped files that a shard computes from, and whether they are what they were. Weights that
// stay in a checkpoint are read in every call, so that whoever writes the file, or cuts it off,
// changes what is computed. One look at each file after a computation says whether that happened.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/result.h"
#include "store/mapped_file.h"

namespace dflash::store {

// Any thread, but for look_again(), which one thread calls at a time.
class WatchedFiles {
 public:
  // Watches a file from now on; one that is watched already stays so. Errors: kCheckpoint.
  Status add(std::shared_ptr<const MappedFile> file);

  // Whether all files are as look_again() saw them last, or as they were when they were added. It
  // costs a system call per file: half a microsecond.
  bool are_as_seen() const;
  // The same since they were added.
  bool are_as_first() const;
  // Takes the files as they are now, and counts that in age(). Errors: kCheckpoint.
  Status look_again();
  // How often the files had changed; 0 as long as they are as they were when they were added. For
  // the thread that looks again.
  uint32_t age() const { return age_; }
  // The path of a file that is not what it was, or else of any.
  std::string changed_path() const;

 private:
  struct Watched {
    std::shared_ptr<const MappedFile> file;
    FileState first, seen;
  };
  mutable std::mutex mutex_;
  std::vector<Watched> files_;  // guarded
  uint32_t age_ = 0;
};

}  // namespace dflash::store
