// Converts between the records of the C table and the types of the core, in both directions. What
// arrives is checked here: enumerations must be in range, and fields that a shorter record lacks
// are 0. And how the functions behind the table answer: a Status becomes its number and a sentence.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <string>

#include "compute/experts/expert_layer.h"
#include "compute/numerics.h"
#include "plugin/backend_abi.h"

namespace dflash::plugin {

// Reads as much of a peer's record as both sides know. Null counts as empty.
template <class Record>
Record read_record(const Record* given) {
  Record record{};
  if (given != nullptr)
    std::memcpy(&record, given, std::min<size_t>(given->struct_size, sizeof record));
  record.struct_size = sizeof record;
  return record;
}
template <class Record>
void write_record(Record* given, Record record) {
  if (given == nullptr) return;
  record.struct_size = given->struct_size;
  std::memcpy(static_cast<void*>(given), &record,
              std::min<size_t>(given->struct_size, sizeof record));
}
// An empty record whose size says that this side knows all of it.
template <class Record>
Record new_record() {
  Record record{};
  record.struct_size = sizeof record;
  return record;
}

template <size_t kBytes>
void set_text(char (&field)[kBytes], const std::string& text) {
  const size_t length = std::min(text.size(), kBytes - 1);
  std::memcpy(field, text.data(), length);
  field[length] = 0;
}
template <size_t kBytes>
std::string text_of(const char (&field)[kBytes]) {
  return std::string(field, ::strnlen(field, kBytes));
}

// Fills `error` and gives its number, as every function of the table returns it.
int32_t report(const Error& failure, dflash_error* error);
// Makes an Error of what the table answered; only for status != 0.
Error error_of(int32_t status, const dflash_error& error);

dflash_ffn_spec to_record(const compute::FfnSpec& spec);
Result<compute::FfnSpec> spec_of(const dflash_ffn_spec& record);

struct LayerOptions {
  uint32_t num_local_experts = 0;
  compute::ResidentFormats formats;
  compute::NumericsClass numerics = compute::kDefaultNumerics;
};
dflash_layer_options to_record(const LayerOptions& options);
Result<LayerOptions> layer_options_of(const dflash_layer_options& record);

dflash_expert to_record(uint32_t local_expert_id, const compute::ExpertWeights& weights);
Result<compute::ExpertWeights> weights_of(const dflash_expert& record);

dflash_batch to_record(const compute::ForwardArgs& args);
Result<compute::ForwardArgs> batch_of(const dflash_batch& record);

// Runs `body` (Status()); whatever it cannot allocate becomes an error, since nothing may be thrown
// through the table.
template <class Body>
int32_t answered(dflash_error* error, Body&& body) {
  try {
    const Status done = body();
    return done.ok() ? 0 : report(done.error(), error);
  } catch (const std::bad_alloc&) {
    return report(
        Error{ErrorCode::kOutOfMemory, "the plug-in could not allocate memory of the host"}, error);
  }
}

// A pointer that a caller has to give. `what`: the table, and the argument.
inline Error missing(const char* what) {
  return Error{ErrorCode::kInvalidArgument, std::string(what) + " is null"};
}

}  // namespace dflash::plugin
