// Loads the plug-in that measures doorbells and calls its C table.
// SPDX-License-Identifier: Apache-2.0
#include "measure/bell_device.h"

#include <sched.h>

#include <atomic>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "plugin/abi_records.h"
#include "plugin/loader.h"

namespace dflash::measure {
namespace {

using plugin::error_of;
using plugin::new_record;

Result<const dflash_bells_table*> load(const std::string& backend, const std::string& directory) {
  const std::string file = "libdflash_" + backend + "_measure.so";
  auto symbol = plugin::find_exported(backend, file, directory, DFLASH_BELLS_SYMBOL);
  if (!symbol.ok()) return std::move(symbol).error();
  const dflash_bells_table* table = nullptr;
  if (symbol.value() != nullptr) table = reinterpret_cast<dflash_bells_entry>(symbol.value())();
  if (table == nullptr || table->struct_size < sizeof *table ||
      table->abi_version != DFLASH_BELLS_ABI_VERSION || table->version == nullptr ||
      std::strcmp(table->version, DFLASH_VERSION) != 0)
    return Error{ErrorCode::kUnsupported, file + " is of another build; build it again"};
  return table;
}

// Polls between two looks at the clock. At each look the core is offered to others, for machines
// that have few.
constexpr uint32_t kPollsPerLook = 1024;

}  // namespace

Result<std::unique_ptr<BellDevice>> BellDevice::open(const std::string& backend, uint32_t device,
                                                     const std::string& directory) {
  auto table = load(backend, directory);
  if (!table.ok()) return std::move(table).error();
  auto error = new_record<dflash_error>();
  dflash_bell_device* opened = nullptr;
  char name[DFLASH_TEXT_BYTES] = "";
  const int32_t status = table.value()->open(device, &opened, name, &error);
  if (status != 0) {
    return error_of(status, error).with("device " + backend + ":" + std::to_string(device));
  }
  return std::unique_ptr<BellDevice>(new BellDevice(*table.value(), opened, plugin::text_of(name)));
}

Result<std::byte*> BellDevice::allocate_pinned(uint64_t num_bytes) {
  auto error = new_record<dflash_error>();
  void* memory = nullptr;
  const int32_t status = table_.allocate_pinned(device_, num_bytes, &memory, &error);
  if (status != 0) return error_of(status, error);
  return static_cast<std::byte*>(memory);
}

Result<std::byte*> BellDevice::map_memory(std::byte* memory, uint64_t num_bytes,
                                          bool is_read_only) {
  auto error = new_record<dflash_error>();
  void* mapped = nullptr;
  const int32_t status =
      table_.map_memory(device_, memory, num_bytes, is_read_only ? 1 : 0, &mapped, &error);
  if (status != 0) return error_of(status, error);
  return static_cast<std::byte*>(mapped);
}

Status BellDevice::ring(dflash_bell_rounds& bells) {
  auto error = new_record<dflash_error>();
  const int32_t status = table_.ring(device_, &bells, &error);
  if (status != 0) return error_of(status, error);
  return ok();
}

// Answers by polling, as a worker that spins would.
std::vector<int64_t> answer_bells(const BellEcho& echo) {
  const Deadline deadline = Deadline::after_ns(echo.timeout_ns);
  const std::atomic_ref<uint32_t> ring(*echo.ring), answer(*echo.answer);
  std::vector<int64_t> seen;
  seen.reserve(echo.num_rounds);
  for (uint32_t polls = 1; seen.size() < echo.num_rounds; ++polls) {
    const uint32_t expected = echo.first + static_cast<uint32_t>(seen.size());
    if (ring.load(std::memory_order_acquire) == expected) {
      answer.store(expected, std::memory_order_release);
      seen.push_back(now_ns());
    } else if (polls % kPollsPerLook == 0) {
      if (deadline.has_passed()) break;
      ::sched_yield();
    }
  }
  return seen;
}

}  // namespace dflash::measure
