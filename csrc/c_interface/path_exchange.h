// The host's ends of data paths while they are being made: an offer goes to the supervisor, and the
// worker's answer completes it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "base/owned_fd.h"
#include "c_interface/connection.h"
#include "client/types.h"
#include "transport/kinds.h"
#include "wire/handover_messages.h"

namespace dflash::c_interface {

// A path whose both ends exist. The pulse is closed where the path renews one of a session.
struct MadePath {
  uint32_t worker = 0;
  client::NewPath path;
  OwnedFd pulse;
};

// One thread at a time.
class PathExchange {
 public:
  explicit PathExchange(uint32_t num_workers) : num_workers_(num_workers) {}

  // Makes the host's end by the supervisor's terms and sends the offer; one that was not answered
  // is given up. Errors: kProtocol for a worker or geometry that cannot be, kUnsupported for
  // another transport than this library has, those of the system and of the connection.
  Status offer(const wire::PathTermsMessage& terms, Connection& connection, Deadline deadline);
  // Completes the host's end. Errors: kProtocol for an answer that nobody asked for or that does
  // not fit, those of the system.
  Result<MadePath> complete(const wire::PathAnswered& answered, std::vector<OwnedFd> descriptors);
  bool awaits(uint32_t worker) const { return offers_.contains(worker); }
  // Gives an offer up whose worker is gone. An answer that is already on its way is then one that
  // nobody asked for.
  void give_up(uint32_t worker) { offers_.erase(worker); }

 private:
  struct Offered {
    std::unique_ptr<transport::PathOffer> offer;
    uint64_t generation = 0;
  };
  const uint32_t num_workers_;
  std::map<uint32_t, Offered> offers_;  // by worker
};

}  // namespace dflash::c_interface
