// Takes what a worker sent out of memory that it can still write, and compares it with what was
// asked in that slot before it is believed. Nothing here acts on it; the engine does.
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
  uint64_t num_bytes = 0;  // bytes of the whole message
  // Its slice is null if the call has ended before, or another holder has answered. The message
  // then frees its slot and means nothing else.
  Attempt attempt;
  bool is_superseded = false;  // another holder has answered
  // Set if the worker refused. Otherwise the slice's reply_rows have been filled and `timing` is
  // valid.
  std::optional<wire::RemoteError> refusal;
  wire::ReplyTiming timing;
};

// Takes one arrival of `path`. An error (kProtocol) means that the worker broke the protocol: it
// has to be given up, and its message is not used.
Result<Answer> take_answer(const Path& path, const transport::Arrival& arrival,
                           BufferPool& buffers);

}  // namespace dflash::client
