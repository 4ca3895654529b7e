// The client adds the replies of shards in the mode of f32-canonical, whatever mode the thread has
// that happens to drive.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <vector>

#include "client/puppet.h"
#include "foreign_float_mode.h"

namespace dflash::client {
namespace {

// The rows of a reply in f32, changed by `change(value)`.
template <class Change>
Message changed(Message reply, Change change) {
  for (size_t at = wire::kReplyTimingBytes; at < reply.payload.size(); at += sizeof(float)) {
    float value = 0;
    std::memcpy(&value, &reply.payload[at], sizeof value);
    value = change(value);
    std::memcpy(&reply.payload[at], &value, sizeof value);
  }
  reply.seal();
  return reply;
}

// A token's output where worker 0 answers rows around `scale`, and worker 1 their `ratio`th part.
// The calling thread is in the mode `word` whenever the client runs.
std::vector<float> sums(float scale, float ratio, unsigned word) {
  PuppetScene scene;
  Tokens tokens{
      {0, 2}
  };
  for (size_t i = 0; i < tokens.hidden.size(); ++i)
    tokens.hidden[i] = scale * (1 + static_cast<float>(i) / 16);
  CallPtr call;
  {
    const ForeignFloatMode mode(word);
    call = scene.submit(tokens);
    CHECK(float_control() == word);
  }
  scene.serve(0);
  scene.puppets[1].send(changed(echo(scene.puppets[1].take()), [&](float v) { return v * ratio; }));
  {
    const ForeignFloatMode mode(word);
    REQUIRE(scene.finish(call).ok());
    CHECK(float_control() == word);
  }
  return tokens.output;
}

TEST_CASE("sums that round, and sums below the normal range, have the same bits in every mode") {
  struct Case {
    float scale, ratio;
  };
  for (const Case& one : {
           Case{1.0f,   7.8e-8f},
           Case{1e-39f, 0.5f   }
  }) {
    const std::vector<float> expected = sums(one.scale, one.ratio, float_control());
    CHECK(expected[0] != 0);
    for (const unsigned word : kForeignModes) {
      const std::vector<float> found = sums(one.scale, one.ratio, word);
      CHECK(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0);
    }
  }
}

}  // namespace
}  // namespace dflash::client
