// The loopback that computes on the thread which waits: one request a poll, in order, and errors of
// whoever serves end it.
// SPDX-License-Identifier: Apache-2.0
#include "transport/loopback/loopback.h"

#include <doctest/doctest.h>

#include <cstring>
#include <utility>
#include <vector>

using namespace dflash;
using namespace dflash::transport;

namespace {

constexpr SlotGeometry kGeometry{3, 64, 64};

std::unique_ptr<Channel> served_by(ServeOne serve_one) {
  auto ends = make_loopback(kGeometry);
  REQUIRE(ends.ok());
  return make_served(std::move(ends).value(), std::move(serve_one));
}

}  // namespace

TEST_CASE("each poll serves one request, and replies come in order") {
  std::vector<uint32_t> served;
  auto host = served_by([&](Channel& worker) -> Result<bool> {
    auto request = worker.poll();
    REQUIRE(request.ok());
    if (!request.value()) return false;
    const Arrival arrival = *request.value();
    served.push_back(arrival.slot);
    std::memcpy(worker.outgoing(arrival.slot).data(), arrival.bytes.data(), arrival.bytes.size());
    DFLASH_TRY(worker.publish(arrival.slot, arrival.bytes.size()));
    return true;
  });
  CHECK(std::string(host->kind()) == "loopback");
  CHECK(host->geometry().num_slots == 3);
  CHECK_FALSE(host->poll().value().has_value());
  for (const uint32_t slot : {0u, 1u, 2u}) {
    host->outgoing(slot)[0] = std::byte(7 + slot);
    REQUIRE(host->publish(slot, 1).ok());
  }
  for (const uint32_t slot : {0u, 1u, 2u}) {
    CHECK(served.size() == slot);
    const auto reply = host->poll().value();
    REQUIRE(reply.has_value());
    CHECK(reply->slot == slot);
    CHECK(reply->bytes[0] == std::byte(7 + slot));
  }
  CHECK_FALSE(host->poll().value().has_value());
}

TEST_CASE("an error of whoever serves ends the path, and nobody is asked without a request") {
  int asked = 0;
  auto host = served_by([&](Channel&) -> Result<bool> {
    ++asked;
    return Error{ErrorCode::kClosed, "the worker was stopped"};
  });
  CHECK_FALSE(host->poll().value().has_value());
  CHECK(asked == 0);
  REQUIRE(host->publish(1, 5).ok());
  CHECK(host->poll().error().code == ErrorCode::kClosed);
  CHECK(asked == 1);
}
