// A checkpoint file that is mapped read-only: workers compute from its pages or pack them without
// reading the whole file. Packing copies what it packs (compute::MappedBytes). Where pages of the
// mapping itself are touched (transposed matrices, scales apart, biases), a file that shrinks while
// it is mapped raises SIGBUS; checkpoints are expected not to change under a worker.
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

namespace dflash::store {

// Any thread, once it is open.
class MappedFile final : public compute::MappedBytes {
 public:
  // Errors: kCheckpoint naming the file (missing, not a regular file, empty, cannot be mapped).
  static Result<std::unique_ptr<MappedFile>> open(const std::string& path);
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
  // A matrix in blocks. Those of an output lie together, and `row_stride_bytes` lead from one
  // output to the next.
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

  // Gives the resident pages of this mapping back to the page cache. They are mapped again when
  // they are touched.
  void drop_pages() const;

 private:
  MappedFile(std::string path, OwnedFd fd, std::byte* base, uint64_t size_bytes)
      : path_(std::move(path)), fd_(std::move(fd)), base_(base), size_bytes_(size_bytes) {}
  Error out_of_file(uint64_t offset) const;
  Result<const std::byte*> rows(uint64_t offset, uint32_t num_rows, uint64_t row_bytes,
                                int64_t stride_bytes) const;

  std::string path_;
  OwnedFd fd_;
  std::byte* base_;
  uint64_t size_bytes_;
};

}  // namespace dflash::store
