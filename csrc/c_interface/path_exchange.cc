// Terms and answers come from the supervisor; both are checked before they are used.
// SPDX-License-Identifier: Apache-2.0
#include "c_interface/path_exchange.h"

#include <sys/socket.h>

#include <limits>
#include <utility>

namespace dflash::c_interface {
namespace {

constexpr uint64_t kMaxSocketSetting = std::numeric_limits<int>::max();
constexpr uint64_t kSlotAlignment = 64;

Error path_error(const std::string& what) {
  return Error{ErrorCode::kProtocol, "the supervisor's data path: " + what};
}

Status check_terms(const wire::PathTermsMessage& terms, uint32_t num_workers) {
  const auto is_slot = [](uint64_t num_bytes) {
    return num_bytes > 0 && num_bytes <= transport::kMaxSlotBytes &&
           num_bytes % kSlotAlignment == 0;
  };
  if (terms.worker >= num_workers)
    return path_error("there is no worker " + std::to_string(terms.worker));
  if (terms.num_slots == 0 || terms.num_slots > transport::kMaxSlots ||
      !is_slot(terms.request_bytes) || !is_slot(terms.reply_bytes)) {
    return path_error(std::to_string(terms.num_slots) + " slots of " +
                      std::to_string(terms.request_bytes) + " and " +
                      std::to_string(terms.reply_bytes) + " bytes cannot be");
  }
  if (terms.socket_buffer_bytes > kMaxSocketSetting || terms.user_timeout_ms > kMaxSocketSetting)
    return path_error("a setting of its socket does not fit");
  return ok();
}

Status check_pulse(const OwnedFd& pulse) {
  int type = 0;
  socklen_t size = sizeof type;
  if (::getsockopt(pulse.get(), SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM)
    return ok();
  return path_error("what stands for the pulse is no stream socket");
}

}  // namespace

Status PathExchange::offer(const wire::PathTermsMessage& terms, Connection& connection,
                           Deadline deadline) {
  DFLASH_TRY(check_terms(terms, num_workers_));
  auto kind = transport::find_kind(transport::transport_kinds(), terms.transport);
  if (!kind.ok()) return std::move(kind).error();
  transport::PathTerms wanted;
  wanted.geometry = {terms.num_slots, terms.request_bytes, terms.reply_bytes};
  wanted.generation = terms.generation;
  wanted.socket_buffer_bytes = static_cast<int>(terms.socket_buffer_bytes);
  wanted.user_timeout_ms = static_cast<int>(terms.user_timeout_ms);
  wanted.local_host = terms.local_host;
  auto made = kind.value()->offer(wanted);
  if (!made.ok()) return std::move(made).error();
  const std::vector<int> descriptors = made.value()->descriptors();
  const auto bytes = made.value()->bytes();
  const wire::PathOffered offered{
      terms.worker,
      terms.generation,
      {bytes.begin(), bytes.end()},
      static_cast<uint16_t>(descriptors.size())
  };
  DFLASH_TRY(connection.send(offered, descriptors, deadline));
  offers_[terms.worker] = {std::move(made).value(), terms.generation};
  return ok();
}

Result<MadePath> PathExchange::complete(const wire::PathAnswered& answered,
                                        std::vector<OwnedFd> descriptors) {
  const auto found = offers_.find(answered.worker);
  if (found == offers_.end() || found->second.generation != answered.generation) {
    return path_error("an answer for worker " + std::to_string(answered.worker) + ", generation " +
                      std::to_string(answered.generation) + ", came where none was asked for");
  }
  const std::unique_ptr<transport::PathOffer> offer = std::move(found->second.offer);
  offers_.erase(found);
  MadePath made;
  made.worker = answered.worker;
  if (answered.has_pulse) {
    if (descriptors.empty()) return path_error("its answer lacks the pulse that it announces");
    made.pulse = std::move(descriptors.back());
    descriptors.pop_back();
    DFLASH_TRY(check_pulse(made.pulse));
  }
  auto channel = offer->complete({answered.payload, std::move(descriptors)});
  if (!channel.ok()) return std::move(channel).error();
  made.path = {std::move(channel).value(), answered.generation};
  return made;
}

}  // namespace dflash::c_interface
