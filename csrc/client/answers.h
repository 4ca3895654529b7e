// Takes what workers sent out of memory that they can still write, and compares it with what was
// asked before it is believed. Whatever does not match ends the worker, never the host.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "client/remedies.h"
#include "wire/payload.h"

namespace dflash::client {

// A slot becomes free by nothing but the whole message that was owed in it, and a slice arrives
// once: what another holder sends for it afterwards only frees that holder's slot. Errors of both
// functions mean that the worker has to be given up.
class Answers {
 public:
  Answers(const Crew& crew, BufferPool& reply_buffers, Calls& calls, Remedies& remedies)
      : crew_(crew), reply_buffers_(reply_buffers), calls_(calls), remedies_(remedies) {}

  Status take(Link& link, const transport::Arrival& arrival);
  // Takes everything that has arrived. The credits bound how much that can be.
  Status drain(Link& link);

 private:
  void take_late(Link& link, uint32_t slot);
  void take_refusal(Link& link, const transport::Arrival& arrival,
                    const wire::RemoteError& refusal);
  void take_rows(Link& link, const transport::Arrival& arrival, const wire::ReplyTiming& timing);
  void learn(Link& link, const Attempt& attempt, uint64_t reply_bytes);

  const Crew& crew_;
  BufferPool& reply_buffers_;
  Calls& calls_;
  Remedies& remedies_;
};

}  // namespace dflash::client
