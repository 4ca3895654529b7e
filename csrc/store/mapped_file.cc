// Opens, maps and reads a checkpoint file, and checks every view against its size.
// SPDX-License-Identifier: Apache-2.0
#include "store/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>

#include "base/clock.h"

namespace dflash::store {
namespace {

// A tick is 1 to 10 ms. A time of change that is further ahead is another clock's.
constexpr int64_t kMostTickNs = 20'000'000;
constexpr int64_t kTickNapNs = 500'000;

int64_t nanoseconds_of(const timespec& time) {
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// The clock by which a kernel of this machine dates changes of files.
int64_t file_clock_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME_COARSE, &now);
  return nanoseconds_of(now);
}

Error checkpoint_error(const std::string& path, const std::string& what) {
  return Error{ErrorCode::kCheckpoint, path + ": " + what};
}

// Returns whether a strided block ends within the file. Arithmetic of 128 bits cannot overflow
// here: counts have 32 bits, strides 63 and offsets 64.
bool end_of_block(uint64_t offset, uint32_t outer, int64_t outer_stride, uint32_t inner,
                  int64_t inner_stride, size_t element_bytes, uint64_t file_bytes) {
  if (outer == 0 || inner == 0 || outer_stride < 0 || inner_stride < 0) return false;
  const unsigned __int128 last =
      static_cast<unsigned __int128>(outer - 1) * static_cast<uint64_t>(outer_stride) +
      static_cast<unsigned __int128>(inner - 1) * static_cast<uint64_t>(inner_stride);
  const unsigned __int128 end = static_cast<unsigned __int128>(offset) + (last + 1) * element_bytes;
  return end <= file_bytes;
}

// Maps a whole file, a large one at a multiple of 2 MiB: file systems that have large pages can
// then map these. Returns MAP_FAILED and errno as mmap does.
void* map_aligned(int fd, uint64_t num_bytes) {
  constexpr uint64_t kHugePage = uint64_t{2} << 20;
  if (num_bytes < kHugePage) return ::mmap(nullptr, num_bytes, PROT_READ, MAP_SHARED, fd, 0);
  const uint64_t reserved = num_bytes + kHugePage;
  void* start = ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return MAP_FAILED;
  const auto begin = reinterpret_cast<uintptr_t>(start);
  const uintptr_t aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
  void* base =
      ::mmap(reinterpret_cast<void*>(aligned), num_bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0);
  const int error_number = errno;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t end =
      base == MAP_FAILED ? aligned : (aligned + num_bytes + page - 1) / page * page;
  if (aligned > begin) ::munmap(start, aligned - begin);
  if (begin + reserved > end) ::munmap(reinterpret_cast<void*>(end), begin + reserved - end);
  if (base != MAP_FAILED) static_cast<void>(::madvise(base, num_bytes, MADV_HUGEPAGE));
  errno = error_number;
  return base;
}

}  // namespace

Result<std::unique_ptr<MappedFile>> MappedFile::open(const std::string& path) {
  OwnedFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.is_open())
    return checkpoint_error(path, std::string("cannot be opened: ") + std::strerror(errno));
  return of_descriptor(std::move(fd), path);
}

Result<std::unique_ptr<MappedFile>> MappedFile::of_descriptor(OwnedFd fd, const std::string& path) {
  struct stat facts{};
  if (::fstat(fd.get(), &facts) != 0)
    return checkpoint_error(path, std::string("cannot be examined: ") + std::strerror(errno));
  if (!S_ISREG(facts.st_mode)) return checkpoint_error(path, "is not a regular file");
  if (facts.st_size <= 0) return checkpoint_error(path, "is empty");
  const auto size_bytes = static_cast<uint64_t>(facts.st_size);
  void* base = map_aligned(fd.get(), size_bytes);
  if (base == MAP_FAILED)
    return checkpoint_error(path, std::string("cannot be mapped: ") + std::strerror(errno));
  constexpr int kFixed = F_SEAL_WRITE | F_SEAL_SHRINK;
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);  // -1 where it is no file in memory
  const bool can_change = seals < 0 || (seals & kFixed) != kFixed;
  return std::unique_ptr<MappedFile>(
      new MappedFile(path, std::move(fd), static_cast<std::byte*>(base), size_bytes, can_change));
}

MappedFile::~MappedFile() { ::munmap(base_, size_bytes_); }

Error MappedFile::out_of_file(uint64_t offset) const {
  return checkpoint_error(path_, "a tensor at byte " + std::to_string(offset) +
                                     " reaches beyond the end of the file (" +
                                     std::to_string(size_bytes_) +
                                     " bytes); the file is truncated or its header is wrong");
}

Result<std::span<const std::byte>> MappedFile::bytes(uint64_t offset, uint64_t num_bytes) const {
  if (offset > size_bytes_ || num_bytes > size_bytes_ - offset) return out_of_file(offset);
  return std::span<const std::byte>(base_ + offset, num_bytes);
}

Result<compute::MatrixView> MappedFile::matrix(uint64_t offset, Dtype dtype, uint32_t outputs,
                                               uint32_t inputs, int64_t output_stride,
                                               int64_t input_stride) const {
  if (!end_of_block(offset, outputs, output_stride, inputs, input_stride, dtype_bytes(dtype),
                    size_bytes_)) {
    return out_of_file(offset);
  }
  return compute::MatrixView{.data = base_ + offset,
                             .format = compute::format_of(dtype),
                             .outputs = outputs,
                             .inputs = inputs,
                             .output_stride = output_stride,
                             .input_stride = input_stride,
                             .file = this};
}

Result<const std::byte*> MappedFile::rows(uint64_t offset, uint32_t num_rows, uint64_t row_bytes,
                                          int64_t stride_bytes) const {
  const unsigned __int128 end =
      static_cast<unsigned __int128>(offset) + row_bytes +
      static_cast<unsigned __int128>(num_rows - 1) * static_cast<uint64_t>(stride_bytes);
  if (num_rows == 0 || row_bytes == 0 || stride_bytes < 0 || end > size_bytes_)
    return out_of_file(offset);
  return static_cast<const std::byte*>(base_ + offset);
}

Result<compute::MatrixView> MappedFile::blocks(uint64_t offset, compute::WeightFormat format,
                                               uint32_t outputs, uint32_t inputs,
                                               int64_t row_stride_bytes) const {
  auto data = rows(offset, outputs, compute::row_bytes(format, inputs), row_stride_bytes);
  if (!data.ok()) return std::move(data).error();
  return compute::MatrixView{.data = data.value(),
                             .format = format,
                             .outputs = outputs,
                             .inputs = inputs,
                             .output_stride = row_stride_bytes,
                             .file = this};
}

Status MappedFile::add_scales(uint64_t offset, int64_t row_stride_bytes,
                              compute::MatrixView& matrix) const {
  const compute::FormatFacts& facts = compute::format_facts(matrix.format);
  if (facts.scale_bytes == 0)
    return checkpoint_error(path_, std::string("scales apart of a matrix in ") + facts.name);
  const uint32_t num_rows = (matrix.outputs + facts.scale_outputs - 1) / facts.scale_outputs;
  const uint64_t row_bytes =
      uint64_t{(matrix.inputs + facts.scale_inputs - 1) / facts.scale_inputs} * facts.scale_bytes;
  auto data = rows(offset, num_rows, row_bytes, row_stride_bytes);
  if (!data.ok()) return std::move(data).error();
  matrix.scales = data.value();
  matrix.scales_stride = row_stride_bytes;
  return ok();
}

Result<compute::VectorView> MappedFile::vector(uint64_t offset, Dtype dtype, uint32_t count,
                                               int64_t stride) const {
  if (!end_of_block(offset, 1, 0, count, stride, dtype_bytes(dtype), size_bytes_))
    return out_of_file(offset);
  return compute::VectorView{base_ + offset, dtype, count, stride};
}

Status MappedFile::copy(const std::byte* from, size_t num_bytes, std::byte* to) const {
  auto offset = static_cast<uint64_t>(from - base_);
  while (num_bytes > 0) {
    const ssize_t got = ::pread(fd_.get(), to, num_bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0)
      return checkpoint_error(path_, std::string("cannot be read: ") + std::strerror(errno));
    if (got == 0) {
      return checkpoint_error(
          path_, "ends at byte " + std::to_string(offset) + ", but had " +
                     std::to_string(size_bytes_) +
                     " bytes when it was opened; it must not change while a worker loads from it");
    }
    to += got;
    offset += static_cast<uint64_t>(got);
    num_bytes -= static_cast<size_t>(got);
  }
  return ok();
}

Result<MappedFile::Identity> MappedFile::identity() const {
  struct stat facts{};
  if (::fstat(fd_.get(), &facts) != 0)
    return checkpoint_error(path_, std::string("cannot be examined: ") + std::strerror(errno));
  return Identity{facts.st_dev, facts.st_ino, facts.st_size, nanoseconds_of(facts.st_mtim),
                  nanoseconds_of(facts.st_ctim)};
}

// The count comes first: a page that fails later makes it another one.
Result<FileState> MappedFile::settled_state() const {
  FileState state{.num_faults = num_faults()};
  DFLASH_TRY(mend());
  const Deadline until = Deadline::after_ns(kMostTickNs);
  for (;;) {
    const int64_t clock_ns = file_clock_ns();
    struct stat facts{};
    if (::fstat(fd_.get(), &facts) != 0)
      return checkpoint_error(path_, std::string("cannot be examined: ") + std::strerror(errno));
    state.size = facts.st_size;
    state.modified_ns = nanoseconds_of(facts.st_mtim);
    state.changed_ns = nanoseconds_of(facts.st_ctim);
    if (state.changed_ns < clock_ns || until.has_passed()) return state;
    nap_ns(kTickNapNs);
  }
}

bool MappedFile::is_as(const FileState& state) const {
  struct stat facts{};
  return ::fstat(fd_.get(), &facts) == 0 && facts.st_size == state.size &&
         nanoseconds_of(facts.st_mtim) == state.modified_ns &&
         nanoseconds_of(facts.st_ctim) == state.changed_ns && num_faults() == state.num_faults;
}

Status MappedFile::mend() const {
  if (!guard_.take_torn()) return ok();
  if (::mmap(base_, size_bytes_, PROT_READ, MAP_SHARED | MAP_FIXED, fd_.get(), 0) == MAP_FAILED) {
    const int error_number = errno;
    guard_.put_back_torn();
    return checkpoint_error(path_, std::string("cannot be mapped: ") + std::strerror(error_number));
  }
  return ok();
}

void MappedFile::will_need(std::span<const std::byte> range) const {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(range.data());
  const uintptr_t first = begin / page * page;
  static_cast<void>(
      ::madvise(reinterpret_cast<void*>(first), begin + range.size() - first, MADV_WILLNEED));
}

void MappedFile::drop_pages() const { ::madvise(base_, size_bytes_, MADV_DONTNEED); }

}  // namespace dflash::store
