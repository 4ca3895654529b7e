// Mapped checkpoint files: views hold the file's bytes, and nothing outside the file can be
// addressed.
// SPDX-License-Identifier: Apache-2.0
#include "store/mapped_file.h"

#include <doctest/doctest.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "base/owned_fd.h"

namespace dflash::store {
namespace {

constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();
constexpr int64_t kHugeStride = std::numeric_limits<int64_t>::max();

// A file of bytes 0, 1, 2 ... that goes away with the test.
class TemporaryFile {
 public:
  explicit TemporaryFile(size_t num_bytes) : fd_(::mkstemp(path_.data())) {
    REQUIRE(fd_.is_open());
    std::vector<std::byte> content(num_bytes);
    for (size_t i = 0; i < num_bytes; ++i) content[i] = static_cast<std::byte>(i);
    REQUIRE(::write(fd_.get(), content.data(), num_bytes) == static_cast<ssize_t>(num_bytes));
  }
  ~TemporaryFile() { ::unlink(path_.c_str()); }
  const char* path() const { return path_.c_str(); }
  void shorten(off_t num_bytes) const { REQUIRE(::ftruncate(fd_.get(), num_bytes) == 0); }

 private:
  std::string path_ = std::filesystem::temp_directory_path() / "mapped_file_test_XXXXXX";
  OwnedFd fd_;
};

TEST_CASE(
    "what is copied are the file's bytes, and a file that has become shorter is an error rather "
    "than SIGBUS") {
  const TemporaryFile file(100);
  const auto mapped = MappedFile::open(file.path()).value();
  const auto matrix = mapped->matrix(10, Dtype::kF16, 4, 8, 8, 1);
  REQUIRE(matrix.ok());
  CHECK(matrix.value().file == mapped.get());
  std::vector<std::byte> found(64);
  REQUIRE(mapped->copy(matrix.value().data, found.size(), found.data()).ok());
  for (size_t i = 0; i < found.size(); ++i) CHECK(found[i] == static_cast<std::byte>(10 + i));
  file.shorten(50);
  const Status copied = mapped->copy(matrix.value().data, found.size(), found.data());
  REQUIRE_FALSE(copied.ok());
  CHECK(copied.error().code == ErrorCode::kCheckpoint);
  CHECK(copied.error().message.find("ends at byte 50, but had 100 bytes") != std::string::npos);
}

TEST_CASE("bytes are the file's, up to its very end and not one further") {
  const TemporaryFile file(100);
  const auto mapped = MappedFile::open(file.path()).value();
  CHECK(mapped->size_bytes() == 100);
  const auto tail = mapped->bytes(98, 2);
  REQUIRE(tail.ok());
  CHECK(tail.value()[1] == std::byte{99});
  CHECK(mapped->bytes(100, 0).ok());
  CHECK(!mapped->bytes(98, 3).ok());
  CHECK(!mapped->bytes(101, 0).ok());
  CHECK(!mapped->bytes(1, kHuge).ok());
  CHECK(!mapped->bytes(kHuge, 1).ok());
  CHECK(!mapped->bytes(kHuge, kHuge).ok());
  CHECK(mapped->bytes(99, 2).error().code == ErrorCode::kCheckpoint);
  CHECK(mapped->bytes(99, 2).error().message.find(file.path()) != std::string::npos);
}

TEST_CASE("a matrix view may end at the file's end in any layout") {
  const TemporaryFile file(100);
  const auto mapped = MappedFile::open(file.path()).value();
  CHECK(mapped->matrix(4, Dtype::kF32, 4, 6, 6, 1).ok());    // 4 + 24 * 4 = 100
  CHECK(mapped->matrix(4, Dtype::kF32, 4, 6, 1, 4).ok());    // transposed
  CHECK(mapped->matrix(52, Dtype::kBF16, 4, 6, 6, 1).ok());  // 52 + 24 * 2 = 100
  CHECK(!mapped->matrix(5, Dtype::kF32, 4, 6, 6, 1).ok());
  CHECK(!mapped->matrix(4, Dtype::kF32, 4, 6, 7, 1).ok());
  CHECK(!mapped->matrix(4, Dtype::kF32, 4, 7, 6, 1).ok());
  CHECK(!mapped->matrix(53, Dtype::kBF16, 4, 6, 6, 1).ok());
  const auto view = mapped->matrix(10, Dtype::kF16, 2, 3, 3, 1).value();
  CHECK(view.data[0] == std::byte{10});
  CHECK(view.outputs == 2);
  CHECK(view.inputs == 3);
}

TEST_CASE("offsets and strides that would wrap around are out of the file, not inside it") {
  const TemporaryFile file(100);
  const auto mapped = MappedFile::open(file.path()).value();
  constexpr uint32_t kMany = std::numeric_limits<uint32_t>::max();
  CHECK(!mapped->matrix(0, Dtype::kF32, kMany, kMany, kHugeStride, kHugeStride).ok());
  CHECK(!mapped->matrix(kHuge, Dtype::kF32, 1, 1, 1, 1).ok());
  CHECK(!mapped->matrix(kHuge - 3, Dtype::kF32, 1, 1, 1, 1).ok());
  CHECK(!mapped->matrix(0, Dtype::kF32, 2, 1, (int64_t{1} << 62), 1).ok());
  CHECK(!mapped->matrix(50, Dtype::kF32, 2, 2, -2, 1).ok());
  CHECK(!mapped->matrix(0, Dtype::kF32, 0, 2, 2, 1).ok());
  CHECK(!mapped->vector(0, Dtype::kF32, 2, kHugeStride).ok());
  CHECK(!mapped->vector(0, Dtype::kF32, 26, 1).ok());
  CHECK(!mapped->vector(96, Dtype::kF32, 2, 1).ok());
  CHECK(mapped->vector(0, Dtype::kF32, 25, 1).ok());
}

TEST_CASE("dropped pages are read again when they are touched") {
  const TemporaryFile file(70'000);
  const auto mapped = MappedFile::open(file.path()).value();
  const auto bytes = mapped->bytes(0, 70'000).value();
  const std::vector<std::byte> before(bytes.begin(), bytes.end());
  mapped->drop_pages();
  CHECK(std::memcmp(before.data(), bytes.data(), before.size()) == 0);
}

TEST_CASE("a file that is missing, empty or no file is a checkpoint error with its path") {
  const TemporaryFile empty(0);
  for (const std::string& path : {std::string("/nonexistent/model.safetensors"),
                                  std::string(empty.path()), std::string("/tmp")}) {
    const auto mapped = MappedFile::open(path);
    REQUIRE(!mapped.ok());
    CHECK(mapped.error().code == ErrorCode::kCheckpoint);
    CHECK(mapped.error().message.find(path) != std::string::npos);
  }
}

}  // namespace
}  // namespace dflash::store
