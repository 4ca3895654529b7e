// What a worker sent, taken out of memory that it can still write, and compared with what was asked
// in that slot before it is believed. Nothing here acts on it: the engine does.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "base/result.h"
#include "client/buffer_pool.h"
#include "client/path.h"
#include "wire/payload.h"

namespace dflash::client {

// A well-formed message that answers what was asked in its slot.
struct Answer {
  uint32_t slot = 0;
  uint64_t num_bytes = 0;  // of the whole message
  // Null: the call has ended before; the message frees its slot and means nothing else.
  Slice* slice = nullptr;
  // Set: the worker refused. Otherwise slice->reply_rows has been filled, and `timing` holds.
  std::optional<wire::RemoteError> refusal;
  wire::ReplyTiming timing;
};

// Takes one arrival of `path`. An error (kProtocol) is a worker that broke the protocol: it has to
// be given up, and its message is not used.
Result<Answer> take_answer(const Path& path, const transport::Arrival& arrival,
                           BufferPool& buffers);

}  // namespace dflash::client
