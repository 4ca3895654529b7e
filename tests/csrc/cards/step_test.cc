// Device steps on the simulator: the very bytes and sums of the processor's client, and what
// happens when workers do not answer as they should.
// SPDX-License-Identifier: Apache-2.0
#include "cards/step_scene.h"
#include "failed.h"

namespace dflash::device_exchange {
namespace {

uint32_t code_of(const StepOutcome& outcome) { return static_cast<uint32_t>(outcome.error >> 56); }

// The same calls by the processor's client; ids and generation agree, so that requests can be
// compared byte for byte.
void run_at_client(StepScene& scene, std::vector<CallTensors>& calls) {
  for (CallTensors& call : calls) {
    auto submitted = scene.client.submit(call.batch(), kLayer);
    REQUIRE(submitted.ok());
    REQUIRE(scene.client.wait(submitted.value(), Deadline::after_ms(30'000)));
    REQUIRE(scene.client.outcome(submitted.value()).ok());
  }
}

std::vector<CallTensors> calls_of(Dtype model) {
  std::vector<CallTensors> calls;
  uint32_t seed = 1;
  for (const uint32_t tokens : {1u, 2u, 7u, 64u}) calls.emplace_back(tokens, 3, model, seed++);
  // duplicates, and more pairs than a shard has experts
  calls.emplace_back(2, 8, model, seed++, 3u);
  calls.emplace_back(3, 1, model, seed++, 1u);  // one worker has nothing to do
  calls.emplace_back(1, 2, model, seed++);
  for (int64_t& id : calls.back().ids) id = kExperts;  // nobody has anything to do
  return calls;
}

void check_equal(Dtypes dtypes, SimulatedVendor vendor) {
  std::vector<CallTensors> expected = calls_of(dtypes.model), found = calls_of(dtypes.model);
  StepScene at_client(dtypes), on_device(dtypes);
  run_at_client(at_client, expected);
  StepDevice device(vendor);
  device.begin(on_device);
  for (CallTensors& call : found) REQUIRE(device.steps.add(call.step_call()).ok());
  const StepOutcome outcome = device.finish(on_device);
  CHECK(outcome.error == 0);
  for (size_t i = 0; i < found.size(); ++i)
    CHECK_MESSAGE(found[i].output == expected[i].output, "call " << i);
  const auto requests = on_device.stop();
  CHECK(requests == at_client.stop());
  CHECK(requests[0].size() + requests[1].size() >= 10);
}

}  // namespace

TEST_CASE(
    "a device step sends the bytes of the processor's client and gives its sums, for every pair of "
    "dtypes") {
  for (const Dtype model : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
    for (const Dtype wire : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
      CAPTURE(static_cast<int>(model));
      CAPTURE(static_cast<int>(wire));
      check_equal({model, wire, wire},
                  wire == Dtype::kF16 ? SimulatedVendor::kHip : SimulatedVendor::kCuda);
    }
  }
  check_equal({Dtype::kBF16, Dtype::kBF16, Dtype::kF32}, SimulatedVendor::kCuda);
}

TEST_CASE(
    "the block's checksum is that of base/checksum.h, as the requests of widths that leave tails "
    "show") {
  // 3 rows of 40 bf16 and 7 of f32 end off every multiple of 32; single tokens leave lanes without
  // words.
  check_equal({Dtype::kF32, Dtype::kBF16, Dtype::kF16}, SimulatedVendor::kCuda);
}

TEST_CASE("steps follow each other on the same paths, and the client goes on where they end") {
  StepScene scene({});
  StepDevice device;
  CallTensors first(5, 3, Dtype::kF32, 1), second(5, 3, Dtype::kF32, 1),
      third(5, 3, Dtype::kF32, 1);
  for (CallTensors* call : {&first, &second}) {
    device.begin(scene);
    REQUIRE(device.steps.add(call->step_call()).ok());
    CHECK(device.finish(scene).error == 0);
  }
  std::vector<CallTensors> calls = {third};
  run_at_client(scene, calls);
  CHECK(first.output == second.output);
  CHECK(first.output == calls[0].output);
}

TEST_CASE("a step whose shards another worker answers for gives the same sums") {
  StepScene scene({});
  REQUIRE(scene.client.set_holders(kLayer, 0, {1, 0}).ok());
  StepDevice device;
  std::vector<CallTensors> before = calls_of(Dtype::kF32), after = calls_of(Dtype::kF32);
  device.begin(scene);
  for (CallTensors& call : before) REQUIRE(device.steps.add(call.step_call()).ok());
  CHECK(device.steps.define_layer({kLayer, kIn, kOut, {}, {}}).error().message ==
        "a layer is defined within a step");
  CHECK(device.finish(scene).error == 0);

  scene.client.mark_lost(1, "its process ended");
  device.define({0, 0}, {0, 1});  // both shards at worker 0, whose path is the only one
  device.begin(scene);
  for (CallTensors& call : after) REQUIRE(device.steps.add(call.step_call()).ok());
  CHECK(device.finish(scene).error == 0);
  for (size_t i = 0; i < after.size(); ++i)
    CHECK_MESSAGE(after[i].output == before[i].output, "call " << i);
}

TEST_CASE(
    "while a step is open calls wait until it ends, and a step is refused while replies are owed") {
  StepScene scene({}, [](const Bytes&) { return Bytes(); });
  CallTensors call(1, 3, Dtype::kF32, 1);
  auto owed = scene.client.submit(call.batch(), kLayer);
  REQUIRE(owed.ok());
  CHECK(scene.client.begin_step(4).error().message == Has{"still owes replies"});
  scene.client.abandon(owed.value());
  CHECK_FALSE(scene.client.begin_step(4).ok());  // the slot is quarantined

  StepScene other({});
  StepDevice device;
  device.begin(other);
  const auto parked = other.client.submit(call.batch(), kLayer);
  REQUIRE(parked.ok());
  CHECK_FALSE(other.client.wait(parked.value(), Deadline::after_ms(30)));
  CHECK(device.finish(other).error == 0);
  REQUIRE(other.client.wait(parked.value(), Deadline::after_ms(60'000)));
  CHECK(other.client.outcome(parked.value()).ok());
}

TEST_CASE(
    "a silent worker ends the step at its budget, and later calls of the step return at once") {
  StepScene scene({}, [](const Bytes&) { return Bytes(); });
  StepDevice device;
  device.begin(scene, std::chrono::milliseconds(300));
  std::vector<CallTensors> calls(20, CallTensors(3, 3, Dtype::kF32, 1));
  for (CallTensors& call : calls) REQUIRE(device.steps.add(call.step_call()).ok());
  const int64_t began = now_ns();
  const StepOutcome outcome = device.finish(scene);
  CHECK(code_of(outcome) == static_cast<uint32_t>(ErrorCode::kTimeout));
  CHECK(outcome.layer == kLayer);
  CHECK(now_ns() - began < 20'000'000'000);  // not twenty times the budget, by far
  const auto requests = scene.stop();
  CHECK(requests[0].size() + requests[1].size() <= 2);
  CHECK_FALSE(scene.client.begin_step(4).ok());  // until the paths are renewed
  const auto worn = scene.client.retire_worn_paths();
  REQUIRE(worn.size() == 2);
  CHECK(worn[0].reason == Has{"step failed"});
}

TEST_CASE("a step that is aborted ends without its budget") {
  StepScene scene({}, [](const Bytes&) { return Bytes(); });
  StepDevice device;
  device.begin(scene);
  CallTensors call(3, 3, Dtype::kF32, 1);
  REQUIRE(device.steps.add(call.step_call()).ok());
  const Deadline deadline = Deadline::after_ms(30'000);
  while (scene.workers[0]->num_requests + scene.workers[1]->num_requests < 2 &&
         !deadline.has_passed()) {
    CHECK_FALSE(device.steps.wait(std::chrono::milliseconds(1)).value());
  }
  std::thread other([&] { device.steps.abort(); });  // as any thread may
  CHECK(code_of(device.finish(scene)) == static_cast<uint32_t>(ErrorCode::kClosed));
  other.join();
}

TEST_CASE("replies that are another's, damaged, of another length or refusals fail the step") {
  struct Lie {
    const char* what;
    RuleWorker::Rule rule;
    ErrorCode code;
  };
  const auto changed = [](auto change) {
    return [change](const Bytes& request) {
      Bytes answer = honest_answer(request);
      change(answer);
      return answer;
    };
  };
  const auto resealed = [&](auto change) {
    return changed([change](Bytes& answer) {
      wire::FrameHeader header = header_of(answer);
      change(header);
      set_header(answer, header);
    });
  };
  const std::vector<Lie> lies = {
      {"payload",    changed([](Bytes& a) { a.back() ^= std::byte{1}; }),                ErrorCode::kProtocol    },
      {"header",     changed([](Bytes& a) { a[33] ^= std::byte{1}; }),                   ErrorCode::kProtocol    },
      {"length",     changed([](Bytes& a) { a.resize(a.size() - 4); }),                  ErrorCode::kProtocol    },
      {"nothing",    changed([](Bytes& a) { a.resize(16); }),                            ErrorCode::kProtocol    },
      {"call",       resealed([](wire::FrameHeader& h) { h.call_id -= 1; }),             ErrorCode::kProtocol    },
      {"generation", resealed([](wire::FrameHeader& h) { h.generation += 1; }),
       ErrorCode::kProtocol                                                                                      },
      {"shard",      resealed([](wire::FrameHeader& h) { h.shard += 1; }),               ErrorCode::kProtocol    },
      {"weights",    resealed([](wire::FrameHeader& h) { h.weights_fingerprint ^= 1; }),
       ErrorCode::kProtocol                                                                                      },
      {"refusal",
       [](const Bytes& request) {
         wire::FrameHeader header = header_of(request);
         Bytes answer(wire::kFrameHeaderBytes + wire::kMaxErrorPayloadBytes);
         auto payload =
             std::span(answer).subspan<wire::kFrameHeaderBytes, wire::kMaxErrorPayloadBytes>();
         answer.resize(
             wire::kFrameHeaderBytes +
             wire::encode_error({ErrorCode::kWorkerFailed, "the card is on fire"}, payload));
         header.kind = wire::FrameKind::kError;
         header.num_rows = header.num_pairs = 0;
         header.payload_bytes = static_cast<uint32_t>(answer.size() - wire::kFrameHeaderBytes);
         header.payload_checksum = checksum(std::span(answer).subspan(wire::kFrameHeaderBytes));
         set_header(answer, header);
         return answer;
       },                                                                                ErrorCode::kWorkerFailed},
  };
  for (const Lie& lie : lies) {
    CAPTURE(lie.what);
    StepScene scene({}, lie.rule);
    StepDevice device;
    device.begin(scene);
    CallTensors call(3, 3, Dtype::kF32, 1);
    REQUIRE(device.steps.add(call.step_call()).ok());
    CHECK(code_of(device.finish(scene)) == static_cast<uint32_t>(lie.code));
  }
}

TEST_CASE("a worker that closes its end fails the step as lost") {
  StepScene scene({}, [](const Bytes&) { return Bytes(); });
  StepDevice device;
  device.begin(scene);
  scene.stop();
  CallTensors call(3, 3, Dtype::kF32, 1);
  REQUIRE(device.steps.add(call.step_call()).ok());
  CHECK(code_of(device.finish(scene)) == static_cast<uint32_t>(ErrorCode::kWorkerLost));
}

TEST_CASE(
    "values that the wire cannot hold and negative ids fail the step with the token; nothing of "
    "that shard is sent") {
  StepScene scene({Dtype::kF32, Dtype::kF16, Dtype::kF16});
  StepDevice device;
  device.begin(scene);
  CallTensors call(3, 3, Dtype::kF32, 1);
  reinterpret_cast<float*>(call.hidden.data())[2 * kIn + 5] = 1e6f;
  REQUIRE(device.steps.add(call.step_call()).ok());
  const StepOutcome outcome = device.finish(scene);
  CHECK(code_of(outcome) == static_cast<uint32_t>(ErrorCode::kRange));
  CHECK((outcome.error & 0xffffffu) == 2);

  StepScene other({});
  StepDevice another;
  another.begin(other);
  call.ids[4] = -1;
  REQUIRE(another.steps.add(call.step_call()).ok());
  const StepOutcome negative = another.finish(other);
  CHECK(code_of(negative) == static_cast<uint32_t>(ErrorCode::kInvalidArgument));
  CHECK((negative.error & 0xffffffu) == 1);
}

TEST_CASE("an id beyond the sentinel fails the step with the token") {
  for (const int64_t id : {int64_t{kExperts} + 1, int64_t{1} << 40}) {
    StepScene scene({});
    StepDevice device;
    device.begin(scene);
    CallTensors call(3, 3, Dtype::kF32, 1);
    call.ids[8] = id;
    REQUIRE(device.steps.add(call.step_call()).ok());
    const StepOutcome outcome = device.finish(scene);
    CHECK(code_of(outcome) == static_cast<uint32_t>(ErrorCode::kInvalidArgument));
    CHECK((outcome.error & 0xffffffu) == 2);
  }
}

TEST_CASE(
    "a value that the wire cannot hold keeps its row from every worker, whichever thread of the "
    "device meets it") {
  for (uint32_t column = 0; column < kIn; column += kIn / 8) {
    StepScene scene({Dtype::kF32, Dtype::kF16, Dtype::kF16});
    StepDevice device;
    device.begin(scene);
    CallTensors call(3, 3, Dtype::kF32, 1);
    call.ids[6] = 0;  // token 2 has an expert of each shard
    call.ids[7] = 1;
    reinterpret_cast<float*>(call.hidden.data())[2 * kIn + column] = 1e6f;
    REQUIRE(device.steps.add(call.step_call()).ok());
    CHECK(code_of(device.finish(scene)) == static_cast<uint32_t>(ErrorCode::kRange));
    for (const auto& requests : scene.stop()) CHECK(requests.empty());
  }
}

TEST_CASE("what does not fit a step is refused before it is queued") {
  StepScene scene({});
  StepDevice device;
  CallTensors call(3, 3, Dtype::kF32, 1), large(65, 3, Dtype::kF32, 1);
  CHECK(device.steps.add(call.step_call()).error().message.find("no device step is open") == 0);
  device.begin(scene);
  CHECK(device.steps.add(large.step_call()).error().message.find("tokens 65; allowed are 1..64") !=
        std::string::npos);
  StepCall unknown = call.step_call();
  unknown.layer = 9;
  CHECK(device.steps.add(unknown).error().message.find("layer 9 is not defined") == 0);
  CHECK(device.finish(scene).error == 0);
}

}  // namespace dflash::device_exchange
