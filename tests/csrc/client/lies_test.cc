// What a worker may say and what the host believes: only the exact answer to the request of that
// slot, once. Everything else ends the worker with a typed error, leaves the output alone and the
// other workers working.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <functional>
#include <limits>

#include "client/puppet.h"
#include "failed.h"

namespace dflash::client {
namespace {

struct Lie {
  const char* what;
  std::function<std::vector<std::byte>(const Message& request)> tell;
};

// An honest reply with one thing changed, its own checksums in order.
std::function<std::vector<std::byte>(const Message&)> reply_with(
    std::function<void(Message&)> change) {
  return [change](const Message& request) {
    Message reply = echo(request);
    change(reply);
    return reply.bytes();
  };
}

std::vector<Lie> lies() {
  using wire::FrameHeader;
  return {
      {"another generation",                 reply_with([](Message& m) { m.header.generation += 1; })           },
      {"another call",                       reply_with([](Message& m) { m.header.call_id += 1; })              },
      {"another layer",                      reply_with([](Message& m) { m.header.layer += 1; })                },
      {"another shard",                      reply_with([](Message& m) { m.header.shard += 1; })                },
      {"another slice",                      reply_with([](Message& m) { m.header.slice += 1; })                },
      {"another attempt",                    reply_with([](Message& m) { m.header.attempt += 1; })              },
      {"other weights",                      reply_with([](Message& m) { m.header.weights_fingerprint ^= 1; })  },
      {"fewer rows, consistently",           reply_with([](Message& m) {
         m.header.num_rows -= 1;
         m.payload.resize(m.payload.size() - kWidth * 4);
         m.seal();
       })                                                                     },
      {"other pairs",                        reply_with([](Message& m) { m.header.num_pairs += 1; })            },
      {"another reply dtype",                reply_with([](Message& m) { m.header.reply_dtype = Dtype::kBF16; })},
      {"another request dtype",
       reply_with([](Message& m) { m.header.request_dtype = Dtype::kF16; })                                     },
      {"a longer payload",                   reply_with([](Message& m) {
         m.payload.resize(m.payload.size() + 4);
         m.seal();
       })                                                                             },
      {"a length that is not the message's",
       reply_with([](Message& m) { m.header.payload_bytes -= 4; })                                              },
      {"a flipped bit in a row",             reply_with([](Message& m) { m.payload.back() ^= std::byte{1}; })   },
      {"a flipped bit in the timing",
       reply_with([](Message& m) { m.payload.front() ^= std::byte{1}; })                                        },
      {"a request",                          [](const Message& request) { return request.bytes(); }             },
      {"a flipped header bit",
       [](const Message& request) {
         auto bytes = echo(request).bytes();
         bytes[20] ^= std::byte{4};
         return bytes;
       }                                                                                                        },
      {"a short message",                    [](const Message&) { return std::vector<std::byte>(63); }          },
      {"nothing",                            [](const Message&) { return std::vector<std::byte>(); }            },
      {"an error with a flipped bit",
       [](const Message& request) {
         auto bytes = refusal(request, {ErrorCode::kRange, "text"}).bytes();
         bytes.back() ^= std::byte{1};
         return bytes;
       }                                                                                                        },
      {"an error that is too long",
       [](const Message& request) {
         Message reply = refusal(request, {ErrorCode::kRange, "text"});
         reply.payload.resize(wire::kMaxErrorPayloadBytes + 1, std::byte{'x'});
         reply.seal();
         return reply.bytes();
       }                                                                                                        },
      {"an error of an unknown code",
       [](const Message& request) {
         Message reply = refusal(request, {ErrorCode::kRange, "text"});
         reply.payload[0] = reply.payload[1] = std::byte{0xff};
         reply.seal();
         return reply.bytes();
       }                                                                                                        },
  };
}

TEST_CASE("a lie loses the worker with a protocol error, writes nothing and spares the others") {
  for (const Lie& lie : lies()) {
    CAPTURE(lie.what);
    PuppetScene scene;
    Tokens tokens{
        {2, 3},
        {2, 2}
    };
    const CallPtr call = scene.submit(tokens);
    const Message request = scene.puppets[1].take();
    scene.puppets[1].send(request.slot, lie.tell(request));
    CHECK(scene.finish(call) ==
          Failed(ErrorCode::kProtocol, "worker w1", "model.layers.3.mlp.experts"));
    CHECK(tokens.is_untouched());
    CHECK(scene.client.workers()[1].path == PathState::kLost);
    CHECK(scene.client.submit(tokens.batch(), 3) == Failed(ErrorCode::kWorkerLost));
    CHECK(scene.works(0));
  }
}

TEST_CASE("a second answer to a request loses the worker") {
  PuppetScene scene;
  Tokens done{{2}}, pending{{2}};
  const CallPtr first = scene.submit(done), second = scene.submit(pending);
  const Message request = scene.puppets[1].take();
  scene.puppets[1].send(echo(request));
  CHECK(scene.finish(first).ok());
  scene.puppets[1].send(echo(request));  // its slot is free now
  CHECK(scene.finish(second) == Failed(ErrorCode::kProtocol));
  CHECK(pending.is_untouched());
}

TEST_CASE("right answers in each other's slots lose the worker") {
  PuppetScene scene;
  Tokens one{{2}}, other{{2}};
  const CallPtr first = scene.submit(one), second = scene.submit(other);
  Message a = echo(scene.puppets[1].take()), b = echo(scene.puppets[1].take());
  std::swap(a.slot, b.slot);
  scene.puppets[1].send(a);
  scene.puppets[1].send(b);
  for (const CallPtr& call : {first, second}) {
    CHECK(scene.finish(call) == Failed(ErrorCode::kProtocol));
  }
  CHECK(one.is_untouched());
  CHECK(other.is_untouched());
}

TEST_CASE("clock readings from a worker are numbers like any other: nonsense counts as nothing") {
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min(),
                    kMax = std::numeric_limits<int64_t>::max();
  PuppetScene scene;
  for (const wire::ReplyTiming timing : {
           wire::ReplyTiming{kMin, kMax, kMin},
           {kMax, kMin, kMax},
           {0,    kMin, 1   },
           {5,    4,    3   }
  }) {
    Tokens tokens{{2}};
    const CallPtr call = scene.submit(tokens);
    Message reply = echo(scene.puppets[1].take());
    wire::encode_reply_timing(timing, std::span(reply.payload).first<wire::kReplyTimingBytes>());
    reply.seal();
    scene.puppets[1].send(reply);
    CHECK(scene.finish(call).ok());
    CHECK(tokens.is_right());
  }
  for (const CountersOf& one : scene.client.counters()) {
    CHECK(one.counters.worker_compute_ns == 0);
    CHECK(one.counters.worker_queue_ns == 0);
  }
}

TEST_CASE("a refusal fails its call only: the worker goes on") {
  PuppetScene scene;
  for (const ErrorCode code : {ErrorCode::kRange, ErrorCode::kProtocol, ErrorCode::kOutOfMemory}) {
    Tokens tokens{{0}, {2}};
    const CallPtr call = scene.submit(tokens);
    const Message other = scene.puppets[0].take();
    scene.puppets[1].send(refusal(scene.puppets[1].take(), {code, "row 0 is strange\x1b[2J"}));
    const Status outcome = scene.finish(call);
    REQUIRE(!outcome.ok());
    CHECK(outcome.error().code ==
          (code == ErrorCode::kRange ? ErrorCode::kRange : ErrorCode::kWorkerFailed));
    CHECK(outcome.error().message == Has{"worker w1"});
    CHECK(outcome.error().message == Has{"row 0 is strange"});
    CHECK(outcome.error().message.find('\x1b') == std::string::npos);
    CHECK(tokens.is_untouched());
    CHECK(scene.client.workers()[0].quarantined_slots == 1);  // its part was under way
    scene.puppets[0].send(echo(other));
    CHECK(scene.works(1));
    CHECK(scene.works(0));
    CHECK(scene.client.workers()[0].quarantined_slots == 0);
  }
  CHECK(scene.client.workers()[0].stale_replies == 3);
}

}  // namespace
}  // namespace dflash::client
