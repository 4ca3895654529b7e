// A call over every transport of the table, and over one that only a test knows: whoever has a row
// makes both ends, without Python and without a word about which row it is.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include "transport/handshake.h"
#include "transport/toy_kind.h"
#include "worker/scene.h"

namespace dflash::worker {
namespace {

TEST_CASE("a call gives the oracle's rows over every row of the table and over a new one") {
  for (const transport::TransportKind& kind : transport::testing::kinds_and_toy()) {
    CAPTURE(kind.name);
    Scene scene;
    transport::ChannelPair ends = transport::testing::handshake(kind, scene.host->geometry());
    scene.host = std::move(ends.host);
    scene.worker_end = std::move(ends.worker);
    scene.start();
    const auto batch = toy::wire_batch(toy_spec(), kNumExperts, 5, 1);
    const Answer answer = scene.ask(scene.request(batch).message());
    REQUIRE(answer.header.kind == wire::FrameKind::kReply);
    const auto rows = std::span(answer.payload).subspan(wire::kReplyTimingBytes);
    CHECK(std::ranges::equal(rows, scene.expected_rows(batch)));
    CHECK(scene.end().ok());
  }
}

}  // namespace
}  // namespace dflash::worker
