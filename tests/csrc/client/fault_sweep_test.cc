// Client and worker together over a channel that misbehaves once: whatever operation it hits, the
// call ends in time with the right bits or a typed error, and never with a wrong number. Tests may
// know both sides; the libraries do not.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <chrono>
#include <future>
#include <string>

#include "client/expert_client.h"
#include "compute/toy_experts.h"
#include "failed.h"
#include "transport/faulty/faulty.h"
#include "transport/loopback/loopback.h"
#include "worker/expert_worker.h"
#include "worker/loans.h"

namespace dflash::client {
namespace {

using transport::FaultKind;
using transport::FaultPoint;

constexpr uint32_t kNumTokens = 6;
constexpr uint32_t kTopK = 2;
constexpr uint32_t kNumExperts = 4;
constexpr uint32_t kSlices = 3;  // of a call: slice_tokens 2

compute::FfnSpec toy_spec() {
  compute::FfnSpec spec;
  spec.in_size = spec.out_size = 24;
  spec.intermediate_size = 16;
  return spec;
}

// A client with one worker behind a faulty channel, served by a thread.
class Pair {
 public:
  explicit Pair(const transport::Fault& fault) : client_(options(fault)) {
    worker::WorkerOptions worker_options;
    worker_options.name = "w0";
    worker_ = worker::ExpertWorker::create(worker_options).value();
    const compute::toy::Experts experts(toy_spec(), kNumExperts, Dtype::kF32, 5);
    const store::ShardFacts facts = worker::toy::facts_of(toy_spec(), kNumExperts, 77);
    REQUIRE(worker_->hold({1, 0}, worker::toy::borrow_loaded(store_, facts, experts)).ok());
    auto ends = transport::make_loopback({2, 4096, 4096}).value();
    NewWorker worker;
    worker.name = "w0";
    worker.policy = {2, 2};
    worker.path.generation = 1;
    worker.path.channel = fault.kind == FaultKind::kNone
                              ? std::move(ends.host)
                              : transport::make_faulty(std::move(ends.host), fault);
    REQUIRE(client_.add_worker(std::move(worker)).ok());
    LayerPlan plan{1,           "model.layers.1.mlp.experts",        24, 24,
                   kNumExperts, {ShardPlace{0, 0, 77, {0, 1, 2, 3}}}};
    REQUIRE(client_.define_layer(plan).ok());
    served_ = std::async(std::launch::async, [this, end = std::move(ends.worker)]() mutable {
      return worker_->serve(std::move(end), 1);
    });
  }
  ~Pair() {
    worker_->stop(1);
    served_.wait();
  }

  // One call; its output is in `output` when it succeeds.
  Status run(std::vector<float>& output) {
    std::mt19937 random(9);
    const std::vector<float> hidden = compute::toy::random_floats(random, kNumTokens * 24, 1.0f);
    const std::vector<int32_t> ids = {0, 1, 2, 3, 1, 2, 3, 0, 0, 2, 1, 3};
    const std::vector<float> weights(kNumTokens * kTopK, 0.5f);
    output.assign(kNumTokens * 24, -7.0f);
    TokenBatch batch;
    batch.hidden_states = reinterpret_cast<const std::byte*>(hidden.data());
    batch.row_stride_bytes = 24 * sizeof(float);
    batch.num_tokens = kNumTokens;
    batch.top_k = kTopK;
    batch.topk_ids = ids.data();
    batch.topk_weights = reinterpret_cast<const std::byte*>(weights.data());
    batch.output = reinterpret_cast<std::byte*>(output.data());
    auto call = client_.submit(batch, 1);
    if (!call.ok()) return std::move(call).error();
    REQUIRE(client_.wait(call.value(), Deadline::after_ms(20'000)));
    return client_.outcome(call.value());
  }

 private:
  // Only a lost message is waited for in vain. All else is answered in microseconds, unless the
  // worker's thread waits for a core.
  static ClientOptions options(const transport::Fault& fault) {
    const bool is_lost = fault.kind == FaultKind::kDrop && fault.nth <= kSlices;
    return {is_lost ? 150'000'000 : 15'000'000'000, 2'000'000'000};
  }

  store::ShardStore store_{worker::toy::processor()};
  std::unique_ptr<worker::ExpertWorker> worker_;
  ExpertClient client_;
  std::future<Status> served_;
};

bool is_expected(FaultKind kind, ErrorCode code) {
  switch (kind) {
    case FaultKind::kFail: return code == ErrorCode::kWorkerLost;
    case FaultKind::kDrop: return code == ErrorCode::kTimeout;
    // A spoiled request is refused by the worker or ends its session; a spoiled reply loses the
    // worker.
    case FaultKind::kCorrupt:
    case FaultKind::kTruncate:
      return code == ErrorCode::kProtocol || code == ErrorCode::kWorkerFailed ||
             code == ErrorCode::kWorkerLost || code == ErrorCode::kTimeout;
    default: return false;
  }
}

void sweep(FaultKind kind, FaultPoint point, const std::vector<float>& expected) {
  bool was_untouched = false;
  for (uint64_t nth = 1; !was_untouched; ++nth) {
    REQUIRE(nth <= kSlices + 1);
    for (uint64_t seed = 1;
         seed <= (kind == FaultKind::kCorrupt || kind == FaultKind::kTruncate ? 5u : 1u); ++seed) {
      CAPTURE(static_cast<int>(kind));
      CAPTURE(static_cast<int>(point));
      CAPTURE(nth);
      CAPTURE(seed);
      Pair pair({kind, point, nth, 5.0, seed});
      std::vector<float> output;
      const Status outcome = pair.run(output);
      if (outcome.ok()) {
        CHECK(output == expected);
        CHECK((nth > kSlices || kind == FaultKind::kDelay));
        was_untouched = nth > kSlices;
      } else {
        CHECK_MESSAGE(is_expected(kind, outcome.error().code), outcome.error().message);
        CHECK(outcome.error().message == Has{"w0"});
      }
    }
  }
}

TEST_CASE("one fault anywhere gives the right bits or a typed error, never a wrong number") {
  std::vector<float> expected;
  REQUIRE(Pair({}).run(expected).ok());
  for (const FaultPoint point : {FaultPoint::kPublish, FaultPoint::kPoll}) {
    for (const FaultKind kind : {FaultKind::kFail, FaultKind::kDelay, FaultKind::kDrop,
                                 FaultKind::kTruncate, FaultKind::kCorrupt}) {
      sweep(kind, point, expected);
    }
  }
}

}  // namespace
}  // namespace dflash::client
