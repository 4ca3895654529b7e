// Mapped checkpoint files: views hold the file's bytes, and nothing outside the file can be
// addressed.
// SPDX-License-Identifier: Apache-2.0
#include "store/mapped_file.h"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "failed.h"
#include "store/temporary_file.h"

namespace dflash::store {
namespace {

constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();
constexpr int64_t kHugeStride = std::numeric_limits<int64_t>::max();

TEST_CASE(
    "what is copied are the file's bytes, and a file that has become shorter is an error rather "
    "than SIGBUS") {
  const TemporaryFile file(TemporaryFile::counting(100));
  const auto mapped = MappedFile::open(file.path()).value();
  const auto matrix = mapped->matrix(10, Dtype::kF16, 4, 8, 8, 1);
  REQUIRE(matrix.ok());
  CHECK(matrix.value().file == mapped.get());
  std::vector<std::byte> found(64);
  REQUIRE(mapped->copy(matrix.value().data, found.size(), found.data()).ok());
  for (size_t i = 0; i < found.size(); ++i) CHECK(found[i] == static_cast<std::byte>(10 + i));
  file.shorten(50);
  CHECK(mapped->copy(matrix.value().data, found.size(), found.data()) ==
        Failed(ErrorCode::kCheckpoint, "ends at byte 50, but had 100 bytes"));
}

TEST_CASE("bytes are the file's, up to its very end and not one further") {
  const TemporaryFile file(TemporaryFile::counting(100));
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
  CHECK(mapped->bytes(99, 2) == Failed(ErrorCode::kCheckpoint, file.path()));
}

TEST_CASE("a matrix view may end at the file's end in any layout") {
  const TemporaryFile file(TemporaryFile::counting(100));
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
  const TemporaryFile file(TemporaryFile::counting(100));
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
  const TemporaryFile file(TemporaryFile::counting(70'000));
  const auto mapped = MappedFile::open(file.path()).value();
  const auto bytes = mapped->bytes(0, 70'000).value();
  const std::vector<std::byte> before(bytes.begin(), bytes.end());
  mapped->drop_pages();
  CHECK(std::memcmp(before.data(), bytes.data(), before.size()) == 0);
}

TEST_CASE("a file that is missing, empty or no file is a checkpoint error with its path") {
  const TemporaryFile empty(TemporaryFile::counting(0));
  for (const std::string& path : {std::string("/nonexistent/model.safetensors"),
                                  std::string(empty.path()), std::string("/tmp")}) {
    CHECK(MappedFile::open(path) == Failed(ErrorCode::kCheckpoint, path));
  }
}

constexpr size_t kPage = 4096;

TEST_CASE("every change of a file is seen, also one that leaves the times as `touch -r` does") {
  const TemporaryFile file(TemporaryFile::counting(3 * kPage));
  const auto mapped = MappedFile::open(file.path()).value();
  struct stat before{};
  REQUIRE(::fstat(file.fd(), &before) == 0);
  for (int round = 0; round < 20; ++round) {
    const FileState state = mapped->settled_state().value();
    CHECK(mapped->is_as(state));
    if (round % 3 == 0) file.write(kPage, {std::byte{7}});
    if (round % 3 == 1) file.touch();
    if (round % 3 == 2) {
      file.write(5, {std::byte{9}});
      const timespec times[] = {before.st_atim, before.st_mtim};
      REQUIRE(::futimens(file.fd(), times) == 0);
    }
    CHECK_FALSE(mapped->is_as(state));
  }
}

TEST_CASE("a sealed file in memory cannot change, and any other can") {
  const TemporaryFile file(TemporaryFile::counting(100));
  CHECK(MappedFile::open(file.path()).value()->can_change());
  for (const int seals : {0, F_SEAL_WRITE, F_SEAL_SHRINK, F_SEAL_WRITE | F_SEAL_SHRINK}) {
    const OwnedFd memory(::memfd_create("mapped_file_test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    REQUIRE(::write(memory.get(), "weights", 7) == 7);
    if (seals != 0) REQUIRE(::fcntl(memory.get(), F_ADD_SEALS, seals) == 0);
    const auto mapped = MappedFile::open("/proc/self/fd/" + std::to_string(memory.get())).value();
    CHECK(mapped->can_change() == (seals != (F_SEAL_WRITE | F_SEAL_SHRINK)));
    CHECK(static_cast<char>(mapped->bytes(0, 1).value()[0]) == 'w');
  }
}

TEST_CASE("a page that cannot be read is counted, has zeros, and is mapped again once it can") {
  const std::vector<std::byte> content = TemporaryFile::counting(3 * kPage);
  const TemporaryFile file(content);
  const auto mapped = MappedFile::open(file.path()).value();
  const auto* bytes = reinterpret_cast<const volatile uint8_t*>(mapped->bytes(0, 1).value().data());
  const FileState whole = mapped->settled_state().value();
  CHECK(bytes[kPage + 3] == 3);
  file.shorten(kPage);
  CHECK(bytes[kPage + 3] == 0);
  CHECK(bytes[2 * kPage + 3] == 0);
  CHECK(mapped->num_faults() == whole.num_faults + 2);
  CHECK(bytes[3] == 3);
  file.write(0, content);
  CHECK(bytes[kPage + 3] == 0);  // still the page of zeros
  CHECK_FALSE(mapped->is_as(whole));
  const FileState later = mapped->settled_state().value();
  CHECK(bytes[kPage + 3] == 3);
  CHECK(mapped->is_as(later));
}

TEST_CASE("a fault outside of mapped checkpoints ends a process as ever") {
  const TemporaryFile own(TemporaryFile::counting(kPage)), other(TemporaryFile::counting(kPage));
  const auto mapped = MappedFile::open(own.path()).value();
  auto* page =
      static_cast<volatile uint8_t*>(::mmap(nullptr, kPage, PROT_READ, MAP_SHARED, other.fd(), 0));
  REQUIRE(const_cast<uint8_t*>(page) != MAP_FAILED);
  other.shorten(0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(STDERR_FILENO);  // a sanitizer says there what it thinks of this
    ::_exit(page[0] == 0 ? 0 : 0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status != 0);
  ::munmap(const_cast<uint8_t*>(page), kPage);
}

}  // namespace
}  // namespace dflash::store
