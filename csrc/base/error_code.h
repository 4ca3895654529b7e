// What can go wrong, as a number: in the core's results, in a worker's error on the wire, and in
// the state of a device step. A header without the standard library's types, because kernels for
// cards include it too.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace dflash {

// Each code maps to one Python exception (bindings/errors.cc holds the table, docs/errors.md one
// line each).
enum class ErrorCode : uint16_t {
  kInvalidArgument = 1,  // the caller's arguments: ConfigError
  kUnsupported = 2,      // a shape, format or feature nothing here implements: UnsupportedError
  kProtocol = 3,         // bytes from a peer that break the protocol: ProtocolError
  kCheckpoint = 4,       // a file that is missing, truncated or inconsistent: CheckpointError
  kWorkerLost = 5,       // hang-up, frozen progress, or a channel that broke: WorkerLost
  kTimeout = 6,          // a deadline passed: WorkerTimeout
  kRange = 7,            // finite value that the wire dtype cannot hold: WorkerError
  kWorkerFailed = 8,     // the worker answered with an error: WorkerError
  kSystem = 9,           // a system call failed; message carries errno text: DflashError
  kOutOfMemory = 10,     // DflashError
  kClosed = 11,          // the object was closed by its owner: DflashError
};

}  // namespace dflash
