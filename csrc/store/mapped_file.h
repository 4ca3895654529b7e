// A file that is mapped read-only, a checkpoint's or one of packed panels: workers compute from its
// pages or pack them without reading the whole file. Packing copies what it packs
// (compute::MappedBytes). Where pages of the mapping itself are touched (transposed matrices,
// scales apart, biases), one that cannot be read has zeros, and num_faults() counts it
// (bus_guard.h).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/owned_fd.h"
#include "base/result.h"
#include "compute/formats/matrix_view.h"
#include "store/bus_guard.h"

namespace dflash::store {

// Tells whether a checkpoint file was changed since it was read: two equal states, each taken after
// the bytes were read, mean that both readings saw the same bytes.
//
// Why that is enough: a program can set a file's modification time (st_mtime) back, but not the
// time of its last change (st_ctime). The kernel updates both before the first byte of a write can
// be read; so whoever saw a new byte sees a new time afterwards.
//
// What it does not show: stores through another process's writable mapping into a page that is
// dirty already; writes below the file system, to the disk itself; and on a network file system
// changes that are younger than the client's cache of attributes.
struct FileState {
  int64_t size = 0, modified_ns = 0, changed_ns = 0;
  uint64_t num_faults = 0;  // pages of the mapping that could not be read
  bool operator==(const FileState&) const = default;
};

// Any thread, once it is open.
class MappedFile final : public compute::MappedBytes {
 public:
  // Errors: kCheckpoint naming the file (missing, not a regular file, empty, cannot be mapped).
  static Result<std::unique_ptr<MappedFile>> open(const std::string& path);
  // The same for a file that is open already; `path` is what errors call it. The mapping keeps the
  // descriptor, and with it the locks of flock() on it.
  static Result<std::unique_ptr<MappedFile>> of_descriptor(OwnedFd fd, const std::string& path);
  ~MappedFile() override;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size_bytes() const { return size_bytes_; }

  // Views into the mapping, which are valid while this object lives. Every element's address is
  // checked against the file's size by arithmetic that cannot overflow. Strides are in elements and
  // may not be negative. Errors: kCheckpoint.
  Result<std::span<const std::byte>> bytes(uint64_t offset, uint64_t num_bytes) const;
  Result<compute::MatrixView> matrix(uint64_t offset, Dtype dtype, uint32_t outputs,
                                     uint32_t inputs, int64_t output_stride,
                                     int64_t input_stride) const;
  // A matrix in a format that is no float: its weights are stored in blocks of neighbouring inputs
  // (weight_format.h). The blocks of one output lie together, and those of the next output begin
  // `row_stride_bytes` further.
  Result<compute::MatrixView> blocks(uint64_t offset, compute::WeightFormat format,
                                     uint32_t outputs, uint32_t inputs,
                                     int64_t row_stride_bytes) const;
  // Adds to `matrix` its scales that lie apart from its values, in this file (MatrixView says how).
  Status add_scales(uint64_t offset, int64_t row_stride_bytes, compute::MatrixView& matrix) const;
  Result<compute::VectorView> vector(uint64_t offset, Dtype dtype, uint32_t count,
                                     int64_t stride) const;

  // Copies by reading the file, so that no page of the mapping becomes resident. Errors:
  // kCheckpoint where the file has become shorter.
  Status copy(const std::byte* from, size_t num_bytes, std::byte* to) const override;

  // What tells this file from another, and its state now from a later one.
  struct Identity {
    uint64_t device = 0, inode = 0;
    int64_t size = 0, modified_ns = 0, changed_ns = 0;
  };
  // Errors: kCheckpoint.
  Result<Identity> identity() const;
  // False for a file in memory that is sealed against writing and shrinking, as what a worker makes
  // of weights is.
  bool can_change() const { return can_change_; }
  // The state of the file now, from which that after every later change differs. Times have the
  // grain of the kernel's tick (1 to 10 ms; less where a file is looked at, since Linux 6.13), so
  // that this waits until the tick of the last change is over. Pages that could not be read are
  // mapped anew. Errors: kCheckpoint.
  Result<FileState> settled_state() const;
  // Whether the file has this state. It costs one system call.
  bool is_as(const FileState& state) const;
  // How many pages of the mapping were touched and could not be read.
  uint64_t num_faults() const { return guard_.num_faults(); }

  // Asks the system to read what is not in memory of `range`, which lies in this mapping, all at
  // once and without waiting for it.
  void will_need(std::span<const std::byte> range) const;
  // Gives the resident pages of this mapping back to the page cache. They are mapped again when
  // they are touched.
  void drop_pages() const;

 private:
  MappedFile(std::string path, OwnedFd fd, std::byte* base, uint64_t size_bytes, bool can_change)
      : path_(std::move(path)),
        fd_(std::move(fd)),
        base_(base),
        size_bytes_(size_bytes),
        can_change_(can_change),
        guard_(base, size_bytes) {}
  Error out_of_file(uint64_t offset) const;
  Result<const std::byte*> rows(uint64_t offset, uint32_t num_rows, uint64_t row_bytes,
                                int64_t stride_bytes) const;
  Status mend() const;

  std::string path_;
  OwnedFd fd_;
  std::byte* base_;
  uint64_t size_bytes_;
  bool can_change_;
  mutable BusGuard guard_;
};

}  // namespace dflash::store
